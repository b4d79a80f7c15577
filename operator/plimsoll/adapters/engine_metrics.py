"""Parses the Prometheus metrics of an engine, by the metric names of its contract (`plimsoll.engines`).

Problem: a page has a thousand lines of which fifty matter, and many engines are read every few seconds. Engines and
releases differ: metrics have other names, and some changed their meaning.

Idea: one reader for all engines, and a map of names for each. Lines are selected by their first bytes, and only those
are parsed. Label sets (ranks of one engine) are summed. A signal that no metric has is None. If several metrics may
have a signal, the first one on the page counts.

A page of 1 MiB can cost 100 to 240 ms. It is parsed in pieces, between which the event loop runs, so one engine's page
delays nothing else. An ordinary page has 100 KB and costs 1 ms.

iteration_tokens_total of vLLM included cached prompt tokens until mid-2026. Computed tokens are therefore the sum of
computed prompt tokens and generated tokens, which is the same in later releases. The tokens of all steps are used only
if no prompt token was cached or transferred.

A request with one output token has no time per output token, but vLLM counts it as 0. These are subtracted.
"""

from __future__ import annotations

import asyncio
import functools
import math
import re
import time
from collections.abc import Awaitable, Callable, Generator, Iterator, Mapping
from itertools import pairwise
from typing import Final

from plimsoll.core.errors import BackendUnavailable
from plimsoll.core.ports import BucketCounts, EngineReading
from plimsoll.engines.engine import HISTOGRAMS, MetricMap, Signal, Source
from plimsoll.engines.vllm import PROCESS_START_METRIC

# Address, port, path, and name in the certificate; raises BackendUnavailable.
HttpGet = Callable[[str, int, str, str], Awaitable[bytes]]

PIECE_BYTES: Final = 1 << 14  # at most 2,700 lines, some 3 ms
MAX_SERIES: Final = 512  # buckets of a histogram, processes of an engine; those beyond are skipped
_PROCESS_START: Final = PROCESS_START_METRIC.encode()
_LE_LABEL: Final = re.compile(rb'[{,]le="([^"]*)"')


class MetricsReader:
    """Parses the pages of engines with one map of names."""

    def __init__(self, metric_map: MetricMap) -> None:
        self._engine = metric_map.engine
        signals = {signal: sources for signal, sources in metric_map.signals if sources}
        self.values: dict[Signal, tuple[Source, ...]] = {
            signal: sources for signal, sources in signals.items() if signal not in HISTOGRAMS
        }
        self.histograms: dict[Signal, tuple[Source, ...]] = {
            signal: sources for signal, sources in signals.items() if signal in HISTOGRAMS
        }
        values = [source for sources in self.values.values() for source in sources]
        self.summed: Mapping[bytes, str] = {source.metric.encode(): source.metric for source in values}
        self.labels: Mapping[str, tuple[str, re.Pattern[bytes]]] = {
            source.metric: (source.label, re.compile(rb'[{,]%s="([^"]*)"' % re.escape(source.label.encode())))
            for source in values
            if source.label
        }
        self.largest: frozenset[str] = frozenset(
            source.metric for signal in (Signal.KV_USED, Signal.BLOCK_TOKENS) for source in self.values.get(signal, ())
        )
        names = [source.metric for sources in self.histograms.values() for source in sources]
        self.histogram_sums: Mapping[bytes, str] = {f"{name}_sum".encode(): name for name in names}
        self.histogram_buckets: Mapping[bytes, str] = {f"{name}_bucket".encode(): name for name in names}
        every = {*self.summed, *self.histogram_sums, *self.histogram_buckets, _PROCESS_START}
        self._prefixes = (metric_map.prefix.encode(), _PROCESS_START) if metric_map.prefix else tuple(every)
        # Every metric that is read, as a Prometheus regular expression.
        self.names_regex = "|".join(name.decode() for name in sorted(every))

    def parse(self, text: bytes, pod: str, at_s: float) -> EngineReading:
        """The reading of a page that was fetched at `at_s`. Other metrics and malformed lines are skipped.

        Raises ValueError if the page has no metric of the engine.
        """
        steps = self.steps(text, pod, at_s)
        while True:
            try:
                next(steps)
            except StopIteration as done:
                reading: EngineReading = done.value
                return reading

    def steps(self, text: bytes, pod: str, at_s: float) -> Generator[None, None, EngineReading]:
        """As `parse`, in steps of a bounded number of bytes each."""
        page = _Page(self)
        for piece in _pieces(text):
            for line in piece.split(b"\n"):
                if line.startswith(self._prefixes):
                    try:
                        page.add_line(line)
                    except ValueError:
                        continue
            yield
        histograms = {signal: page.histogram(sources) for signal, sources in self.histograms.items()}
        if not page.sums and not page.histogram_sums and not any(histograms.values()):
            raise ValueError(f"the page has no metric of {self._engine}")
        return _reading(page, histograms, pod, at_s)


class _Page:
    """Sums of the parsed lines."""

    def __init__(self, reader: MetricsReader) -> None:
        self._reader = reader
        self.sums: dict[Source, float] = {}
        self.histogram_sums: dict[str, float] = {}
        self.buckets: dict[str, dict[float, float]] = {name: {} for name in reader.histogram_sums.values()}
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
        reader = self._reader
        if (histogram := reader.histogram_buckets.get(name)) is not None:
            self._add_bucket(self.buckets[histogram], labels, _number(rest))
        elif (histogram := reader.histogram_sums.get(name)) is not None:
            self.histogram_sums[histogram] = self.histogram_sums.get(histogram, 0.0) + _number(rest)
        elif (metric := reader.summed.get(name)) is not None:
            self._add_value(metric, labels, _number(rest))
        elif name == _PROCESS_START:
            if len(self.start_times_s) < MAX_SERIES:
                self.start_times_s.add(_number(rest))
        elif name.endswith(b"_created"):
            at_s = _number(rest)
            self.oldest_created_s = at_s if self.oldest_created_s is None else min(self.oldest_created_s, at_s)

    def _add_value(self, metric: str, labels: bytes, value: float) -> None:
        source = whole = Source(metric)
        if (label := self._reader.labels.get(metric)) is not None:
            name, pattern = label
            found = pattern.search(labels)
            source = Source(metric, name, found.group(1).decode("utf-8", "replace") if found else "")
        for part in {source, whole}:
            before = self.sums.get(part, 0.0)
            self.sums[part] = max(before, value) if metric in self._reader.largest else before + value

    @staticmethod
    def _add_bucket(buckets: dict[float, float], labels: bytes, value: float) -> None:
        label = _LE_LABEL.search(labels)
        edge = math.nan if label is None else float(label.group(1))
        if math.isnan(edge):
            raise ValueError("a bucket has no upper bound (le)")
        if edge not in buckets and len(buckets) >= MAX_SERIES and edge < math.inf:
            raise ValueError("the histogram has too many buckets")  # the others are cumulative, so they stay right
        buckets[edge] = buckets.get(edge, 0.0) + value

    @property
    def instance_id(self) -> str:
        """Start time of the process, else creation time of the oldest metric; later label sets change neither."""
        if self.start_times_s:
            return ",".join(map(str, sorted(self.start_times_s)))
        return "" if self.oldest_created_s is None else str(self.oldest_created_s)

    def value(self, signal: Signal) -> float | None:
        """The signal of the first metric that the page has."""
        sources = self._reader.values.get(signal, ())
        return next((self.sums[source] for source in sources if source in self.sums), None)

    def computed_tokens(self) -> float | None:
        """Computed prompt and output tokens; None if cached tokens cannot be separated from them."""
        local, generated = self.value(Signal.LOCAL_PROMPT_TOKENS), self.value(Signal.GENERATED_TOKENS)
        if local is not None and generated is not None:
            return local + generated
        cached, transferred = self.value(Signal.CACHED_PROMPT_TOKENS), self.value(Signal.TRANSFERRED_PROMPT_TOKENS)
        if cached is None or cached > 0.0 or (transferred or 0.0) > 0.0:
            return None
        return self.value(Signal.STEP_TOKENS)

    def kv_tokens(self) -> float | None:
        """Tokens that the KV cache holds."""
        tokens, blocks, of_block = map(self.value, (Signal.KV_TOKENS, Signal.KV_BLOCKS, Signal.BLOCK_TOKENS))
        return blocks * of_block if tokens is None and blocks is not None and of_block is not None else tokens

    def histogram(self, sources: tuple[Source, ...]) -> BucketCounts | None:
        """The first complete histogram of these metrics."""
        return next(filter(None, (self._histogram(source.metric) for source in sources)), None)

    def _histogram(self, metric: str) -> BucketCounts | None:
        """The histogram; None if it lacks the infinite bucket or the sum, or if its cumulative counts decrease."""
        edges, total = sorted(self.buckets[metric]), self.histogram_sums.get(metric)
        if not edges or edges[-1] != math.inf or total is None:
            return None
        cumulative = [0.0, *(self.buckets[metric][edge] for edge in edges)]
        counts = tuple(high - low for low, high in pairwise(cumulative))
        return BucketCounts(tuple(edges), counts, total) if min(counts) >= 0.0 else None


@functools.lru_cache(maxsize=256)
def reader_of(metric_map: MetricMap) -> MetricsReader:
    """The reader of a map of names."""
    return MetricsReader(metric_map)


def parse_metrics(text: bytes, pod: str, at_s: float, metric_map: MetricMap) -> EngineReading:
    """See `MetricsReader.parse`."""
    return reader_of(metric_map).parse(text, pod, at_s)


async def fetch_page(
    http_get: HttpGet,
    address: str,
    port: int,
    path: str,
    pod: str,
    metric_map: MetricMap,
    clock: Callable[[], float] = time.time,
    tls_name: str = "",
) -> tuple[bytes, EngineReading]:
    """Fetch one engine's metrics as they are, and parsed. Raises BackendUnavailable."""
    text = await http_get(address, port, path, tls_name)
    steps = reader_of(metric_map).steps(text, pod, clock())
    while True:
        try:
            next(steps)
        except StopIteration as done:
            return text, done.value
        except ValueError as error:
            raise BackendUnavailable(f"{pod}: {error}") from None
        await asyncio.sleep(0)


def _pieces(text: bytes) -> Iterator[bytes]:
    """Yields the text in pieces of whole lines. Only a line that is longer makes a piece of more than `PIECE_BYTES`."""
    start = 0
    while len(text) - start > PIECE_BYTES:
        end = text.rfind(b"\n", start, start + PIECE_BYTES)
        if end < 0:
            end = text.find(b"\n", start + PIECE_BYTES)
        if end < 0:
            break
        yield text[start:end]
        start = end + 1
    yield text[start:]


def _reading(page: _Page, histograms: Mapping[Signal, BucketCounts | None], pod: str, at_s: float) -> EngineReading:
    value, histogram = page.value, histograms.get
    output = histogram(Signal.OUTPUT_TOKENS)
    return EngineReading(
        pod=pod,
        at_s=at_s,
        instance_id=page.instance_id,
        running=value(Signal.RUNNING),
        waiting=value(Signal.WAITING),
        kv_used=value(Signal.KV_USED),
        steps=value(Signal.STEPS),
        computed_tokens=page.computed_tokens(),
        generated_tokens=value(Signal.GENERATED_TOKENS),
        local_prompt_tokens=value(Signal.LOCAL_PROMPT_TOKENS),
        cached_prompt_tokens=value(Signal.CACHED_PROMPT_TOKENS),
        transferred_prompt_tokens=value(Signal.TRANSFERRED_PROMPT_TOKENS),
        preemptions=value(Signal.PREEMPTIONS),
        post_s=value(Signal.POST_SECONDS),
        transfer_s=value(Signal.TRANSFER_SECONDS),
        draft_tokens=value(Signal.DRAFT_TOKENS),
        accepted_draft_tokens=value(Signal.ACCEPTED_DRAFT_TOKENS),
        all_prompt_tokens=value(Signal.ALL_PROMPT_TOKENS),
        prefill_s=value(Signal.PREFILL_SECONDS),
        decode_s=value(Signal.DECODE_SECONDS),
        busy_s=value(Signal.BUSY_SECONDS),
        kv_tokens=page.kv_tokens(),
        block_tokens=value(Signal.BLOCK_TOKENS),
        prompt_tokens=histogram(Signal.PROMPT_TOKENS),
        output_tokens=output,
        tpot_s=_without_single_tokens(histogram(Signal.TPOT), output),
        ttft_s=histogram(Signal.TTFT),
        itl_s=histogram(Signal.ITL),
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
