"""An engine's metrics in Prometheus' text format, with vLLM's names, labels and order.

Problem: dozens of engines are scraped every second or two, and a client library takes milliseconds for 600 samples.
Idea: names and labels never change, so each sample's prefix is built once; a scrape only appends the numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from plimsoll.engines.vllm import METRIC_PREFIX, Metric
from plimsoll.sim.engine.engine_metrics import MetricHistogram
from simulated.engine_core import EngineCore
from simulated.metric_families import COUNTER_HELP, GAUGE_HELP, HISTOGRAM_HELP, NIXL_COUNTER_HELP
from simulated.options import EngineOptions
from simulated.served_metrics import ServedMetrics

CONTENT_TYPE: Final = "text/plain; version=1.0.0; charset=utf-8"

_REASONS: Final = ("stop", "length", "abort", "error", "repetition")
_REJECTIONS: Final = ("max_num_queued_reqs", "max_num_queued_tokens")

ReadValue = Callable[[], float]


def format_number(value: float) -> str:
    """Return a sample's value as Prometheus' clients write it."""
    return repr(float(value))


def format_labels(pairs: Mapping[str, str]) -> str:
    """Return labels in braces, in alphabetical order."""
    escaped = {key: value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n") for key, value in pairs.items()}
    return "{" + ",".join(f'{key}="{escaped[key]}"' for key in sorted(escaped)) + "}"


class MetricsExposition:
    """The text of one engine; `since` is the Unix time of its start, `deferred` counts what waits for KV elsewhere."""

    def __init__(self, options: EngineOptions, core: EngineCore, created_s: float, deferred: ReadValue) -> None:
        metrics = core.metrics
        self._created_s = created_s
        self._export = options.export
        self._base_labels = {"engine": "0", "model_name": options.served_names[0]}
        self._parts: list[str | tuple[str, ReadValue]] = []
        self._histograms: list[tuple[int, list[str], MetricHistogram]] = []
        self._gauges(core, deferred)
        self._counters(metrics)
        for name, histogram in metrics.histograms.items():
            self._histogram(name, histogram)
        self._cache_info(options)
        if options.kv_role:
            self._transfers(core, metrics)

    def text(self) -> str:
        """Return all samples with their current values."""
        lines: list[str] = []
        for part in self._parts:
            if isinstance(part, str):
                lines.append(part)
            else:
                lines.append(part[0] + format_number(part[1]()))
        for place, starts, histogram in self._histograms:
            values: list[float] = [*histogram.cumulative()]
            values += [values[-1], histogram.total]
            lines[place] = "\n".join(
                [start + format_number(value) for start, value in zip(starts, values, strict=True)]
            )
        lines.append("")
        return "\n".join(lines)

    def _head(self, name: str, kind: str, help_text: str) -> None:
        self._parts.append(f"# HELP {METRIC_PREFIX}{name} {help_text}\n# TYPE {METRIC_PREFIX}{name} {kind}")

    def _gauge(self, name: str, samples: Iterable[tuple[dict[str, str], ReadValue]]) -> None:
        if name not in self._export:
            return
        self._head(name, "gauge", GAUGE_HELP[name])
        self._parts += [
            (f"{METRIC_PREFIX}{name}{format_labels({**self._base_labels, **extra})} ", read) for extra, read in samples
        ]

    def _counter(self, name: str, help_text: str, samples: Iterable[tuple[dict[str, str], ReadValue]]) -> None:
        """Add a counter with vLLM's name, and the time since which it counts."""
        if name not in self._export:
            return
        self._head(f"{name}_total", "counter", help_text)
        labelled = [(format_labels(extra), read) for extra, read in samples]
        self._parts += [(f"{METRIC_PREFIX}{name}_total{braces} ", read) for braces, read in labelled]
        self._head(f"{name}_created", "gauge", help_text)
        self._parts += [
            f"{METRIC_PREFIX}{name}_created{braces} {format_number(self._created_s)}" for braces, _ in labelled
        ]

    def _histogram(self, name: str, histogram: MetricHistogram) -> None:
        if name not in self._export:
            return
        help_text, braces = HISTOGRAM_HELP[name], format_labels(self._base_labels)
        self._head(name, "histogram", help_text)
        bounds = [*(format_number(bound) for bound in histogram.edges[:-1]), "+Inf"]
        starts = [
            f"{METRIC_PREFIX}{name}_bucket{format_labels({**self._base_labels, 'le': _format_bound(edge)})} "
            for edge in bounds
        ]
        starts += [f"{METRIC_PREFIX}{name}_count{braces} ", f"{METRIC_PREFIX}{name}_sum{braces} "]
        self._histograms.append((len(self._parts), starts, histogram))
        self._parts.append("")
        self._head(f"{name}_created", "gauge", help_text)
        self._parts.append(f"{METRIC_PREFIX}{name}_created{braces} {format_number(self._created_s)}")

    def _gauges(self, core: EngineCore, deferred: ReadValue) -> None:
        def waiting_for_kv() -> float:
            return core.loading + deferred()

        self._gauge("num_requests_running", [({}, lambda: core.running)])
        self._gauge("num_requests_waiting", [({}, lambda: core.waiting + waiting_for_kv())])
        self._gauge(
            "num_requests_waiting_by_reason",
            [({"reason": "capacity"}, lambda: core.waiting), ({"reason": "deferred"}, waiting_for_kv)],
        )
        self._gauge(
            "engine_sleep_state",
            [
                ({"sleep_state": "awake"}, lambda: 1.0),
                ({"sleep_state": "weights_offloaded"}, lambda: 0.0),
                ({"sleep_state": "discard_all"}, lambda: 0.0),
            ],
        )
        self._gauge("kv_cache_usage_perc", [({}, lambda: core.kv_cache.used_share)])

    def _counters(self, metrics: ServedMetrics) -> None:
        base_labels = self._base_labels
        model = {"model_name": base_labels["model_name"]}
        samples: dict[str, Iterable[tuple[dict[str, str], ReadValue]]] = {
            "prefix_cache_queries": [(base_labels, lambda: metrics.queried_tokens)],
            "prefix_cache_hits": [(base_labels, lambda: metrics.hit_tokens)],
            "external_prefix_cache_queries": [(base_labels, lambda: metrics.external_queried_tokens)],
            "external_prefix_cache_hits": [(base_labels, lambda: metrics.external_hit_tokens)],
            "prompt_tokens": [(base_labels, lambda: metrics.all_prompt_tokens)],
            "generation_tokens": [(base_labels, lambda: metrics.generated_tokens)],
            "num_preemptions": [(base_labels, lambda: metrics.preemptions)],
            "prompt_tokens_by_source": [
                ({**base_labels, "source": "local_compute"}, lambda: metrics.local_prompt_tokens),
                ({**base_labels, "source": "local_cache_hit"}, lambda: metrics.cached_prompt_tokens),
                ({**base_labels, "source": "external_kv_transfer"}, lambda: metrics.transferred_prompt_tokens),
            ],
            "prompt_tokens_cached": [
                (base_labels, lambda: metrics.cached_prompt_tokens + metrics.transferred_prompt_tokens)
            ],
            "prompt_tokens_cached_by_source": [
                ({**base_labels, "source": "device"}, lambda: metrics.hit_tokens),
                ({**base_labels, "source": "host"}, lambda: 0.0),
                ({**base_labels, "source": "p2p"}, lambda: metrics.external_hit_tokens),
                ({**base_labels, "source": "disk"}, lambda: 0.0),
                ({**base_labels, "source": "external_unspecified"}, lambda: 0.0),
            ],
            "request_success": [
                ({**base_labels, "finished_reason": reason}, _count_reader(metrics.finished, reason))
                for reason in _REASONS
            ],
            "admission_rejections": [
                ({**model, "reason": reason}, _count_reader(metrics.rejected, reason)) for reason in _REJECTIONS
            ],
        }
        for name, help_text in COUNTER_HELP.items():
            self._counter(name, help_text, samples[name])

    def _cache_info(self, options: EngineOptions) -> None:
        profile = options.profile
        config = {
            "block_size": profile.block_size,
            "cache_dtype": "auto",
            "enable_prefix_caching": options.prefix_caching,
            "gpu_memory_utilization": 0.92,
            "kv_cache_max_concurrency": profile.kv_tokens / profile.max_model_len,
            "kv_cache_size_tokens": profile.kv_tokens,
            "num_cpu_blocks": None,
            "num_gpu_blocks": options.blocks,
            "num_gpu_blocks_override": None,
            "prefix_caching_hash_algo": "sha256",
            "sliding_window": None,
        }
        self._head("cache_config_info", "gauge", "Information of the LLMEngine CacheConfig")
        pairs = {"engine": "0", **{key: str(value) for key, value in config.items()}}
        self._parts.append(f"{Metric.CACHE_CONFIG}{format_labels(pairs)} 1.0")

    def _transfers(self, core: EngineCore, metrics: ServedMetrics) -> None:
        for name, histogram in metrics.nixl.items():
            self._histogram(name, histogram)
        for name, help_text in NIXL_COUNTER_HELP.items():
            self._counter(name, help_text, [(self._base_labels, _count_reader(metrics.nixl_counts, name))])
        self._gauge(
            "num_requests_kv_fetch_by_stage",
            [
                ({"stage": "waiting_to_start"}, lambda: 0.0),
                ({"stage": "in_progress"}, lambda: core.loading),
                ({"stage": "completed_waiting"}, lambda: 0.0),
            ],
        )


def _count_reader(counts: Mapping[str, float], name: str) -> ReadValue:
    """Return a reader of one of several counts, 0 before its first count."""
    return lambda: counts.get(name, 0)


def _format_bound(text: str) -> str:
    """Return a bucket's edge as prometheus_client writes it: 2097152.0 is 2.097152e+06."""
    if text == "+Inf" or float(text) < 1e6:
        return text
    mantissa = text.split(".")[0]
    digits = mantissa.rstrip("0")
    return f"{digits[0]}.{digits[1:] or '0'}e+{len(mantissa) - 1:02d}"
