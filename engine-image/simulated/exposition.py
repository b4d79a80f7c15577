"""An engine's meters in Prometheus' text, with vLLM's names, labels and order.

Problem: dozens of engines are scraped every second or two, and a client library takes milliseconds for 600 samples.
Idea: names and labels never change, so each sample's beginning is made once; a scrape only puts numbers behind them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from simulated.core import Core
from simulated.families import COUNTERS, GAUGES, HISTOGRAMS, NIXL_COUNTERS
from simulated.meters import Histogram, Meters
from simulated.options import Options

CONTENT_TYPE: Final = "text/plain; version=1.0.0; charset=utf-8"

_SOURCES: Final = ("local_compute", "local_cache_hit", "external_kv_transfer")
_REASONS: Final = ("stop", "length", "abort", "error", "repetition")
_REJECTIONS: Final = ("max_num_queued_reqs", "max_num_queued_tokens")

Read = Callable[[], float]


def number(value: float) -> str:
    """A sample's value as Prometheus' clients write it."""
    return repr(float(value))


def labels(pairs: Mapping[str, str]) -> str:
    """Labels in braces, in alphabetical order."""
    escaped = {key: value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n") for key, value in pairs.items()}
    return "{" + ",".join(f'{key}="{escaped[key]}"' for key in sorted(escaped)) + "}"


class Exposition:
    """The text of one engine; `since` is the Unix time of its start, `deferred` counts what waits for KV elsewhere."""

    def __init__(self, options: Options, core: Core, meters: Meters, since: float, deferred: Read) -> None:
        self._since = since
        self._export = options.export
        self._own = {"engine": "0", "model_name": options.names[0]}
        self._parts: list[str | tuple[str, Read]] = []
        self._histograms: list[tuple[int, list[str], Histogram]] = []
        self._gauges(core, deferred)
        self._counts(core, meters)
        for name, histogram in meters.histograms.items():
            self._histogram(name, histogram)
        self._info(options)
        if options.role:
            self._transfers(core, meters)

    def text(self) -> str:
        """All samples as they are now."""
        lines: list[str] = []
        for part in self._parts:
            if isinstance(part, str):
                lines.append(part)
            else:
                lines.append(part[0] + number(part[1]()))
        for place, starts, histogram in self._histograms:
            values: list[float] = [*histogram.cumulated()]
            values += [values[-1], histogram.total]
            lines[place] = "\n".join([start + number(value) for start, value in zip(starts, values, strict=True)])
        lines.append("")
        return "\n".join(lines)

    def _head(self, name: str, kind: str, words: str) -> None:
        self._parts.append(f"# HELP vllm:{name} {words}\n# TYPE vllm:{name} {kind}")

    def _gauge(self, name: str, samples: Iterable[tuple[dict[str, str], Read]]) -> None:
        if name not in self._export:
            return
        self._head(name, "gauge", GAUGES[name])
        self._parts += [(f"vllm:{name}{labels({**self._own, **extra})} ", read) for extra, read in samples]

    def _counter(self, name: str, words: str, samples: Iterable[tuple[dict[str, str], Read]]) -> None:
        """A counter of vLLM's naming, with the time since when it counts."""
        if name not in self._export:
            return
        self._head(f"{name}_total", "counter", words)
        made = [(labels(extra), read) for extra, read in samples]
        self._parts += [(f"vllm:{name}_total{braces} ", read) for braces, read in made]
        self._head(f"{name}_created", "gauge", words)
        self._parts += [f"vllm:{name}_created{braces} {number(self._since)}" for braces, _ in made]

    def _histogram(self, name: str, histogram: Histogram) -> None:
        if name not in self._export:
            return
        words, braces = HISTOGRAMS[name], labels(self._own)
        self._head(name, "histogram", words)
        edges = [*(number(bound) for bound in histogram.bounds), "+Inf"]
        starts = [f"vllm:{name}_bucket{labels({**self._own, 'le': _edge(edge)})} " for edge in edges]
        starts += [f"vllm:{name}_count{braces} ", f"vllm:{name}_sum{braces} "]
        self._histograms.append((len(self._parts), starts, histogram))
        self._parts.append("")
        self._head(f"{name}_created", "gauge", words)
        self._parts.append(f"vllm:{name}_created{braces} {number(self._since)}")

    def _gauges(self, core: Core, deferred: Read) -> None:
        def aside() -> float:
            return core.loading + deferred()

        self._gauge("num_requests_running", [({}, lambda: core.running)])
        self._gauge("num_requests_waiting", [({}, lambda: core.waiting + aside())])
        self._gauge(
            "num_requests_waiting_by_reason",
            [({"reason": "capacity"}, lambda: core.waiting), ({"reason": "deferred"}, aside)],
        )
        self._gauge(
            "engine_sleep_state",
            [
                ({"sleep_state": "awake"}, lambda: 1.0),
                ({"sleep_state": "weights_offloaded"}, lambda: 0.0),
                ({"sleep_state": "discard_all"}, lambda: 0.0),
            ],
        )
        self._gauge("kv_cache_usage_perc", [({}, lambda: core.pool.used / core.pool.total)])

    def _counts(self, core: Core, meters: Meters) -> None:
        own, counters = self._own, meters.counters
        model = {"model_name": own["model_name"]}
        samples: dict[str, Iterable[tuple[dict[str, str], Read]]] = {
            "num_preemptions": [(own, lambda: core.preemptions)],
            "prompt_tokens_by_source": [({**own, "source": source}, _count(counters, source)) for source in _SOURCES],
            "prompt_tokens_cached": [(own, lambda: counters["local_cache_hit"] + counters["external_kv_transfer"])],
            "prompt_tokens_cached_by_source": [
                ({**own, "source": "device"}, lambda: counters["prefix_cache_hits"]),
                ({**own, "source": "host"}, lambda: 0.0),
                ({**own, "source": "p2p"}, lambda: counters["external_prefix_cache_hits"]),
                ({**own, "source": "disk"}, lambda: 0.0),
                ({**own, "source": "external_unspecified"}, lambda: 0.0),
            ],
            "request_success": [({**own, "finished_reason": why}, _count(meters.finished, why)) for why in _REASONS],
            "admission_rejections": [({**model, "reason": why}, _count(meters.rejected, why)) for why in _REJECTIONS],
        }
        for name, words in COUNTERS.items():
            self._counter(name, words, samples.get(name, [(own, _count(counters, name))]))

    def _info(self, options: Options) -> None:
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
        self._parts.append(f"vllm:cache_config_info{labels(pairs)} 1.0")

    def _transfers(self, core: Core, meters: Meters) -> None:
        for name, histogram in meters.nixl.items():
            self._histogram(name, histogram)
        for name, words in NIXL_COUNTERS.items():
            self._counter(name, words, [(self._own, _count(meters.counters, name))])
        self._gauge(
            "num_requests_kv_fetch_by_stage",
            [
                ({"stage": "waiting_to_start"}, lambda: 0.0),
                ({"stage": "in_progress"}, lambda: core.loading),
                ({"stage": "completed_waiting"}, lambda: 0.0),
            ],
        )


def _count(counts: Mapping[str, float], name: str) -> Read:
    """Reads one of several counts, also one that nothing has counted into yet."""
    return lambda: counts.get(name, 0)


def _edge(text: str) -> str:
    """A bucket's edge as prometheus_client writes it: 2097152.0 is 2.097152e+06."""
    if text == "+Inf" or float(text) < 1e6:
        return text
    mantissa = text.split(".")[0]
    digits = mantissa.rstrip("0")
    return f"{digits[0]}.{digits[1:] or '0'}e+{len(mantissa) - 1:02d}"
