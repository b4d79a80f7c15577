"""An engine's metrics, from the Prometheus text that it serves.

Problem: the text has a thousand lines of which fifty matter, comes from many engines every few seconds, and differs by
release: names changed, and some names changed what they count.

Idea: lines are chosen by their first bytes and taken apart only then; label sets (ranks of one engine) are added up. A
release that does not export a figure leaves it None. Where vLLM renamed or redefined one:

- kv_cache_usage_perc was gpu_cache_usage_perc until 0.10.
- time_per_output_token_seconds (until 0.12) counts gaps between tokens, as inter_token_latency_seconds does; time per
  output token of a request is request_time_per_output_token_seconds alone, since 0.11.
- prompt_tokens_by_source_total tells computed from cached tokens. Releases without it have prefix_cache_hits_total,
  and gpu_prefix_cache_hits_total before that, which counted blocks.
- iteration_tokens_total counted prompts with their cached tokens until the middle of 2026, so computed tokens are
  those of the source local_compute and generated ones, which is the same in later releases.

A request of one token has no time per output token, yet it is counted as 0: these are taken out again.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Awaitable, Callable
from itertools import pairwise
from typing import Final

from plimsoll.core.errors import Unavailable
from plimsoll.core.ports import Buckets, EngineReading

Ask = Callable[[str, int, str], Awaitable[bytes]]  # of an address, a port and a path; raises Unavailable

_SUMS: Final = frozenset(
    {
        b"vllm:num_requests_running",
        b"vllm:num_requests_waiting",
        b"vllm:iteration_tokens_total_count",
        b"vllm:iteration_tokens_total_sum",
        b"vllm:generation_tokens_total",
        b"vllm:prefix_cache_hits_total",
        b"vllm:external_prefix_cache_hits_total",
        b"vllm:num_preemptions_total",
        b"vllm:nixl_post_time_seconds_sum",
        b"vllm:nixl_xfer_time_seconds_sum",
    }
)
_MAXIMA: Final = frozenset({b"vllm:kv_cache_usage_perc", b"vllm:gpu_cache_usage_perc"})
_SOURCES: Final = b"vllm:prompt_tokens_by_source_total"
_HISTOGRAMS: Final = (
    b"vllm:request_prompt_tokens",
    b"vllm:request_generation_tokens",
    b"vllm:request_time_per_output_token_seconds",
    b"vllm:time_to_first_token_seconds",
    b"vllm:inter_token_latency_seconds",
    b"vllm:time_per_output_token_seconds",
)
_TOTALS: Final = {name + b"_sum": name for name in _HISTOGRAMS}
_BUCKETS: Final = {name + b"_bucket": name for name in _HISTOGRAMS}
_STARTED: Final = b"process_start_time_seconds"
_PREFIXES: Final = (b"vllm:", _STARTED)
NAMES: Final = "|".join(
    name.decode() for name in sorted({*_SUMS, *_MAXIMA, _SOURCES, *_TOTALS, *_BUCKETS, _STARTED})
)  # all that is read, as a regular expression of Prometheus' kind

_EDGE: Final = re.compile(rb'[{,]le="([^"]*)"')
_SOURCE: Final = re.compile(rb'[{,]source="([^"]*)"')


class _Text:
    """What the lines add up to."""

    def __init__(self) -> None:
        self.sums: dict[bytes, float] = {}  # of plain figures; sources are named by their label
        self.buckets: dict[bytes, dict[float, float]] = {name: {} for name in _HISTOGRAMS}
        self.started: set[float] = set()
        self.created: float | None = None

    def line(self, line: bytes) -> None:
        """One sample. Raises ValueError for a broken one."""
        brace = line.find(b"{")
        if brace < 0:
            name, labels, rest = line[: line.index(b" ")], b"", line[line.index(b" ") :]
        else:
            name, end = line[:brace], line.rindex(b"}")
            labels, rest = line[brace:end], line[end + 1 :]
        self._sample(name, labels, rest)

    def _sample(self, name: bytes, labels: bytes, rest: bytes) -> None:
        if name in _BUCKETS:
            self._bucket(self.buckets[_BUCKETS[name]], labels, _number(rest))
        elif name in _SUMS or name in _TOTALS:
            self.sums[name] = self.sums.get(name, 0.0) + _number(rest)
        elif name in _MAXIMA:
            self.sums[name] = max(self.sums.get(name, 0.0), _number(rest))
        elif name == _SOURCES:
            found = _SOURCE.search(labels)
            source = found.group(1) if found else b""
            self.sums[source] = self.sums.get(source, 0.0) + _number(rest)
        elif name == _STARTED:
            self.started.add(_number(rest))
        elif name.endswith(b"_created"):
            at_s = _number(rest)
            self.created = at_s if self.created is None else min(self.created, at_s)

    @staticmethod
    def _bucket(buckets: dict[float, float], labels: bytes, value: float) -> None:
        found = _EDGE.search(labels)
        edge = math.nan if found is None else float(found.group(1))
        if math.isnan(edge):
            raise ValueError("a bucket without an edge")
        buckets[edge] = buckets.get(edge, 0.0) + value

    @property
    def born(self) -> str:
        """The process's start, else that of the oldest metric; label sets that appear later do not change either."""
        if self.started:
            return ",".join(map(str, sorted(self.started)))
        return "" if self.created is None else str(self.created)

    def computed_tokens(self) -> float | None:
        """Computed, prompts and outputs; None where cached tokens cannot be told from them."""
        local, generated = self.sums.get(b"local_compute"), self.sums.get(b"vllm:generation_tokens_total")
        if local is not None and generated is not None:
            return local + generated
        hits = (b"vllm:prefix_cache_hits_total", b"vllm:external_prefix_cache_hits_total")
        if any(self.sums.get(name, 0.0) > 0.0 for name in hits) or hits[0] not in self.sums:
            return None
        return self.sums.get(b"vllm:iteration_tokens_total_sum")

    def histogram(self, name: bytes) -> Buckets | None:
        """None where it is not whole: no infinite bucket, no sum, or counts that fall from one edge to the next."""
        edges, total = sorted(self.buckets[name]), self.sums.get(name + b"_sum")
        if not edges or edges[-1] != math.inf or total is None:
            return None
        below = [0.0, *(self.buckets[name][edge] for edge in edges)]
        counts = tuple(high - low for low, high in pairwise(below))
        return Buckets(tuple(edges), counts, total) if min(counts) >= 0.0 else None


def read(text: bytes, pod: str, at_s: float) -> EngineReading:
    """The reading of a vLLM engine's text (other metrics may stand in it), taken at at_s; broken lines are skipped.

    Raises ValueError if nothing in it is of an engine.
    """
    found = _Text()
    for line in text.split(b"\n"):
        if line.startswith(_PREFIXES):
            try:
                found.line(line)
            except ValueError:
                continue
    histograms = [found.histogram(name) for name in _HISTOGRAMS]
    if not found.sums and not any(histograms):
        raise ValueError("no metric of a vLLM engine is in the text")
    return _reading(found, histograms, pod, at_s)


async def fetch(
    ask: Ask, address: str, port: int, path: str, pod: str, clock: Callable[[], float] = time.time
) -> EngineReading:
    """One engine's metrics now, dated by `clock`. ask: as `pods.get`. Raises Unavailable, with words."""
    text = await ask(address, port, path)
    try:
        return read(text, pod, clock())
    except ValueError as error:
        raise Unavailable(f"{pod}: {error}") from None


def _reading(found: _Text, histograms: list[Buckets | None], pod: str, at_s: float) -> EngineReading:
    sums = found.sums.get
    prompt, output, tpot, ttft, gaps, old_gaps = histograms
    return EngineReading(
        pod=pod,
        at_s=at_s,
        born=found.born,
        running=sums(b"vllm:num_requests_running"),
        waiting=sums(b"vllm:num_requests_waiting"),
        kv_used=sums(b"vllm:kv_cache_usage_perc", sums(b"vllm:gpu_cache_usage_perc")),
        steps=sums(b"vllm:iteration_tokens_total_count"),
        computed_tokens=found.computed_tokens(),
        generated_tokens=sums(b"vllm:generation_tokens_total"),
        local_prompt_tokens=sums(b"local_compute"),
        cached_prompt_tokens=sums(b"local_cache_hit", sums(b"vllm:prefix_cache_hits_total")),
        moved_prompt_tokens=sums(b"external_kv_transfer", sums(b"vllm:external_prefix_cache_hits_total")),
        preemptions=sums(b"vllm:num_preemptions_total"),
        post_s=sums(b"vllm:nixl_post_time_seconds_sum"),
        transfer_s=sums(b"vllm:nixl_xfer_time_seconds_sum"),
        prompt_tokens=prompt,
        output_tokens=output,
        tpot_s=_without_single_tokens(tpot, output),
        ttft_s=ttft,
        gaps_s=gaps or old_gaps,
    )


def _without_single_tokens(tpot_s: Buckets | None, output: Buckets | None) -> Buckets | None:
    if tpot_s is None or output is None or output.edges[0] != 1.0:
        return tpot_s
    first, *others = tpot_s.counts
    return Buckets(tpot_s.edges, (max(0.0, first - output.counts[0]), *others), tpot_s.total)


def _number(rest: bytes) -> float:
    """The value after a name; a time stamp may follow it. Raises ValueError."""
    fields = rest.split(None, 2)
    if not fields:
        raise ValueError("a sample without a value")
    return float(fields[0])
