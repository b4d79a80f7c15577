"""What one service has served since this picker started: latency by length of prompt and output, and work by tenant.

Problem: one histogram of TTFT mixes prompts of 100 and of 100,000 tokens. Cost per request or token must count what
was served: what was rejected, failed or left costs as much GPU time, but it is no product.

Idea: count each response when Envoy reports its successful end, with the tokens that admission control estimated for
it. Lengths fall into four classes each. Tenants have series of their own up to a limit; all others share one.
"""

from __future__ import annotations

from typing import Final

import msgspec
from prometheus_client import Histogram

from plimsoll.gateway.tenant_labels import TenantLabels
from plimsoll.telemetry import gateway_metrics
from plimsoll.telemetry.pending_histogram import PendingHistogram

PROMPT_CLASSES: Final = ((1024, "0-1k"), (8192, "1k-8k"), (32768, "8k-32k"))
OUTPUT_CLASSES: Final = ((64, "0-64"), (256, "64-256"), (1024, "256-1k"))
LONGEST_PROMPT: Final = "32k+"
LONGEST_OUTPUT: Final = "1k+"


class ServedRequest(msgspec.Struct):
    """A successful response. Times are in seconds.

    `output_tokens` are those of all sequences, 0 if nothing is generated. `is_output_known`: they follow from the size
    of the response, and are not the service's mean. `work_s` is its share of an engine's time, 0 if unknown. `queued_s`
    is its wait at the gateway. `is_stream`: its first byte is its first token. `is_within_slo`: it met its targets.
    """

    tenant: str
    prompt_tokens: int
    sequences: int
    output_tokens: int
    is_output_known: bool
    work_s: float
    queued_s: float
    ttft_s: float
    e2e_s: float
    is_stream: bool
    is_within_slo: bool

    @property
    def tpot_s(self) -> float | None:
        """The mean time per output token after the first, None if it is unknown."""
        following = self.output_tokens / self.sequences - 1.0
        if not self.is_stream or not self.is_output_known or following < 1.0:
            return None
        return max(0.0, self.e2e_s - self.ttft_s) / following


class _TenantCounts(msgspec.Struct):
    """What a tenant was served since the metrics were read. `label` is its name in them."""

    label: str
    requests: int = 0
    work_s: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0

    def flush(self, service: str) -> None:
        """Add the counts to the metrics."""
        if not self.requests:
            return
        gateway_metrics.GATEWAY_SERVED_REQUESTS.labels(service, self.label).inc(self.requests)
        gateway_metrics.GATEWAY_SERVED_WORK.labels(service, self.label).inc(self.work_s)
        gateway_metrics.GATEWAY_SERVED_TOKENS.labels(service, self.label, "prompt").inc(self.prompt_tokens)
        gateway_metrics.GATEWAY_SERVED_TOKENS.labels(service, self.label, "output").inc(self.output_tokens)
        self.requests, self.work_s, self.prompt_tokens, self.output_tokens = 0, 0.0, 0, 0


class ServedStats:
    """The counters of one service. A service without `slo` has none: nothing estimates its tokens."""

    def __init__(self, service: str) -> None:
        self._service = service
        self._queue = PendingHistogram(gateway_metrics.GATEWAY_QUEUE_TIME.labels(service))
        self._ttft: dict[str, PendingHistogram] = {}
        self._tpot: dict[str, PendingHistogram] = {}
        self._labels = TenantLabels()
        self._tenants: dict[str, _TenantCounts] = {}  # by label
        self._goodput_tokens = 0  # since the metrics were read

    def record(self, served: ServedRequest) -> None:
        """Count a successful response."""
        self._queue.observe(served.queued_s)
        if served.is_stream:
            prompt = length_class(served.prompt_tokens, PROMPT_CLASSES, LONGEST_PROMPT)
            _child(self._ttft, gateway_metrics.GATEWAY_TTFT_BY_PROMPT, self._service, prompt).observe(served.ttft_s)
        if (tpot_s := served.tpot_s) is not None:
            output = length_class(served.output_tokens // served.sequences, OUTPUT_CLASSES, LONGEST_OUTPUT)
            _child(self._tpot, gateway_metrics.GATEWAY_TPOT_BY_OUTPUT, self._service, output).observe(tpot_s)
        label = self._labels.of(served.tenant)
        counts = self._tenants.get(label)
        if counts is None:
            counts = self._tenants[label] = _TenantCounts(label)
        counts.requests += 1
        counts.work_s += served.work_s
        counts.prompt_tokens += served.prompt_tokens * served.sequences
        counts.output_tokens += served.output_tokens
        if served.is_within_slo:
            self._goodput_tokens += served.output_tokens

    def update_metrics(self) -> None:
        """Update the counters of `/metrics` just before they are read."""
        for histogram in (self._queue, *self._ttft.values(), *self._tpot.values()):
            histogram.flush()
        for counts in self._tenants.values():
            counts.flush(self._service)
        if self._goodput_tokens:
            gateway_metrics.GATEWAY_GOODPUT_TOKENS.labels(self._service).inc(self._goodput_tokens)
            self._goodput_tokens = 0


def length_class(tokens: int, classes: tuple[tuple[int, str], ...], longest: str) -> str:
    """Returns the class of a length: the first whose bound it does not exceed."""
    for bound, name in classes:
        if tokens <= bound:
            return name
    return longest


def _child(children: dict[str, PendingHistogram], histogram: Histogram, service: str, label: str) -> PendingHistogram:
    child = children.get(label)
    if child is None:
        child = children[label] = PendingHistogram(histogram.labels(service, label))
    return child
