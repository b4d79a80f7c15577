"""Parses the Prometheus metrics of a vLLM engine.

Problem: a page has a thousand lines of which fifty matter, and many engines are read every few seconds. Releases
differ: metrics were renamed, and some changed their meaning.

Idea: lines are selected by their first bytes, and only those are parsed. Label sets (ranks of one engine) are summed. A
figure that a release does not export is None. Metrics that vLLM renamed or redefined:

- kv_cache_usage_perc was gpu_cache_usage_perc until 0.10.
- time_per_output_token_seconds (until 0.12) has inter-token latencies, like inter_token_latency_seconds. Only
  request_time_per_output_token_seconds (since 0.11) has the time per output token of a request.
- prompt_tokens_by_source_total separates computed from cached tokens. Releases without it have prefix_cache_hits_total,
  and before that gpu_prefix_cache_hits_total, which counted blocks.
- iteration_tokens_total included cached prompt tokens until mid-2026. Computed tokens are therefore the sum of the
  source local_compute and the generated tokens, which is the same in later releases.

A request with one output token has no time per output token, but vLLM counts it as 0. These are subtracted.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from itertools import pairwise
from typing import Final

from plimsoll.core.errors import BackendUnavailable
from plimsoll.core.ports import BucketCounts, EngineReading
from plimsoll.engines.vllm import METRIC_PREFIX, PROCESS_START_METRIC, Metric, PromptSource

HttpGet = Callable[[str, int, str], Awaitable[bytes]]  # address, port and path; raises BackendUnavailable

_SUMMED_METRICS: Final = {
    metric.encode(): metric
    for metric in (
        Metric.RUNNING,
        Metric.WAITING,
        Metric.STEPS,
        Metric.STEP_TOKENS,
        Metric.GENERATED_TOKENS,
        Metric.LOCAL_CACHE_HITS,
        Metric.EXTERNAL_CACHE_HITS,
        Metric.PREEMPTIONS,
        Metric.NIXL_POST_SECONDS,
        Metric.NIXL_TRANSFER_SECONDS,
    )
}
_MAX_METRICS: Final = {metric.encode(): metric for metric in (Metric.KV_USED, Metric.KV_USED_UNTIL_0_10)}
_PROMPT_TOKENS_BY_SOURCE: Final = Metric.PROMPT_TOKENS_BY_SOURCE.encode()
_HISTOGRAM_METRICS: Final = (
    Metric.PROMPT_TOKENS,
    Metric.OUTPUT_TOKENS,
    Metric.TPOT,
    Metric.TTFT,
    Metric.ITL,
    Metric.ITL_UNTIL_0_12,
)
_HISTOGRAM_SUMS: Final = {f"{metric}_sum".encode(): f"{metric}_sum" for metric in _HISTOGRAM_METRICS}
_HISTOGRAM_BUCKETS: Final = {f"{metric}_bucket".encode(): metric for metric in _HISTOGRAM_METRICS}
_TOTALS: Final[Mapping[bytes, str]] = {**_SUMMED_METRICS, **_HISTOGRAM_SUMS}
_PROCESS_START: Final = PROCESS_START_METRIC.encode()
_PREFIXES: Final = (METRIC_PREFIX.encode(), _PROCESS_START)
METRIC_NAMES_REGEX: Final = "|".join(
    name.decode()
    for name in sorted({*_TOTALS, *_MAX_METRICS, _PROMPT_TOKENS_BY_SOURCE, *_HISTOGRAM_BUCKETS, _PROCESS_START})
)  # every metric that is read, as a Prometheus regular expression

_LE_LABEL: Final = re.compile(rb'[{,]le="([^"]*)"')
_SOURCE_LABEL: Final = re.compile(rb'[{,]source="([^"]*)"')


class _MetricsAccumulator:
    """Sums of the parsed lines."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}  # by metric name; prompt tokens by their source label
        self.buckets: dict[Metric, dict[float, float]] = {metric: {} for metric in _HISTOGRAM_METRICS}
        self.start_times_s: set[float] = set()
        self.oldest_created_s: float | None = None

    def add_line(self, sample: bytes) -> None:
        """Add one sample. Raises ValueError if it is malformed."""
        brace = sample.find(b"{")
        if brace < 0:
            name, labels, rest = sample[: sample.index(b" ")], b"", sample[sample.index(b" ") :]
        else:
            name, end = sample[:brace], sample.rindex(b"}")
            labels, rest = sample[brace:end], sample[end + 1 :]
        self._add_sample(name, labels, rest)

    def _add_sample(self, name: bytes, labels: bytes, rest: bytes) -> None:
        if (histogram := _HISTOGRAM_BUCKETS.get(name)) is not None:
            self._add_bucket(self.buckets[histogram], labels, _number(rest))
        elif (total := _TOTALS.get(name)) is not None:
            self.sums[total] = self.sums.get(total, 0.0) + _number(rest)
        elif (gauge := _MAX_METRICS.get(name)) is not None:
            self.sums[gauge] = max(self.sums.get(gauge, 0.0), _number(rest))
        elif name == _PROMPT_TOKENS_BY_SOURCE:
            label = _SOURCE_LABEL.search(labels)
            source = label.group(1).decode("utf-8", "replace") if label else ""
            self.sums[source] = self.sums.get(source, 0.0) + _number(rest)
        elif name == _PROCESS_START:
            self.start_times_s.add(_number(rest))
        elif name.endswith(b"_created"):
            at_s = _number(rest)
            self.oldest_created_s = at_s if self.oldest_created_s is None else min(self.oldest_created_s, at_s)

    @staticmethod
    def _add_bucket(buckets: dict[float, float], labels: bytes, value: float) -> None:
        label = _LE_LABEL.search(labels)
        edge = math.nan if label is None else float(label.group(1))
        if math.isnan(edge):
            raise ValueError("a bucket has no upper bound (le)")
        buckets[edge] = buckets.get(edge, 0.0) + value

    @property
    def instance_id(self) -> str:
        """Start time of the process, else creation time of the oldest metric; later label sets change neither."""
        if self.start_times_s:
            return ",".join(map(str, sorted(self.start_times_s)))
        return "" if self.oldest_created_s is None else str(self.oldest_created_s)

    def computed_tokens(self) -> float | None:
        """Computed prompt and output tokens; None if cached tokens cannot be separated from them."""
        local, generated = self.sums.get(PromptSource.COMPUTED), self.sums.get(Metric.GENERATED_TOKENS)
        if local is not None and generated is not None:
            return local + generated
        hits = (Metric.LOCAL_CACHE_HITS, Metric.EXTERNAL_CACHE_HITS)
        if any(self.sums.get(name, 0.0) > 0.0 for name in hits) or hits[0] not in self.sums:
            return None
        return self.sums.get(Metric.STEP_TOKENS)

    def histogram(self, metric: Metric) -> BucketCounts | None:
        """The histogram; None if it lacks the infinite bucket or the sum, or if its cumulative counts decrease."""
        edges, total = sorted(self.buckets[metric]), self.sums.get(f"{metric}_sum")
        if not edges or edges[-1] != math.inf or total is None:
            return None
        cumulative = [0.0, *(self.buckets[metric][edge] for edge in edges)]
        counts = tuple(high - low for low, high in pairwise(cumulative))
        return BucketCounts(tuple(edges), counts, total) if min(counts) >= 0.0 else None


def parse_metrics(text: bytes, pod: str, at_s: float) -> EngineReading:
    """The reading of a vLLM metrics page that was fetched at `at_s`. Other metrics and malformed lines are skipped.

    Raises ValueError if the page has no metric of an engine.
    """
    accumulator = _MetricsAccumulator()
    for line in text.split(b"\n"):
        if line.startswith(_PREFIXES):
            try:
                accumulator.add_line(line)
            except ValueError:
                continue
    histograms = [accumulator.histogram(metric) for metric in _HISTOGRAM_METRICS]
    if not accumulator.sums and not any(histograms):
        raise ValueError("the page has no metric of a vLLM engine")
    return _reading(accumulator, histograms, pod, at_s)


async def fetch_metrics(
    http_get: HttpGet, address: str, port: int, path: str, pod: str, clock: Callable[[], float] = time.time
) -> EngineReading:
    """Fetch one engine's metrics, dated by `clock`. Raises BackendUnavailable."""
    return (await fetch_page(http_get, address, port, path, pod, clock))[1]


async def fetch_page(
    http_get: HttpGet, address: str, port: int, path: str, pod: str, clock: Callable[[], float] = time.time
) -> tuple[bytes, EngineReading]:
    """Fetch one engine's metrics as they are, and parsed. Raises BackendUnavailable."""
    text = await http_get(address, port, path)
    try:
        return text, parse_metrics(text, pod, clock())
    except ValueError as error:
        raise BackendUnavailable(f"{pod}: {error}") from None


def _reading(
    accumulator: _MetricsAccumulator, histograms: list[BucketCounts | None], pod: str, at_s: float
) -> EngineReading:
    sums = accumulator.sums.get
    prompt, output, tpot, ttft, itl, legacy_itl = histograms
    return EngineReading(
        pod=pod,
        at_s=at_s,
        instance_id=accumulator.instance_id,
        running=sums(Metric.RUNNING),
        waiting=sums(Metric.WAITING),
        kv_used=sums(Metric.KV_USED, sums(Metric.KV_USED_UNTIL_0_10)),
        steps=sums(Metric.STEPS),
        computed_tokens=accumulator.computed_tokens(),
        generated_tokens=sums(Metric.GENERATED_TOKENS),
        local_prompt_tokens=sums(PromptSource.COMPUTED),
        cached_prompt_tokens=sums(PromptSource.CACHED, sums(Metric.LOCAL_CACHE_HITS)),
        transferred_prompt_tokens=sums(PromptSource.TRANSFERRED, sums(Metric.EXTERNAL_CACHE_HITS)),
        preemptions=sums(Metric.PREEMPTIONS),
        post_s=sums(Metric.NIXL_POST_SECONDS),
        transfer_s=sums(Metric.NIXL_TRANSFER_SECONDS),
        prompt_tokens=prompt,
        output_tokens=output,
        tpot_s=_without_single_tokens(tpot, output),
        ttft_s=ttft,
        itl_s=itl or legacy_itl,
    )


def _without_single_tokens(tpot_s: BucketCounts | None, output: BucketCounts | None) -> BucketCounts | None:
    if tpot_s is None or output is None or output.edges[0] != 1.0:
        return tpot_s
    first, *others = tpot_s.counts
    return BucketCounts(tpot_s.edges, (max(0.0, first - output.counts[0]), *others), tpot_s.value_sum)


def _number(rest: bytes) -> float:
    """The value of a sample; a timestamp may follow it. Raises ValueError."""
    fields = rest.split(None, 2)
    if not fields:
        raise ValueError("a sample has no value")
    return float(fields[0])
