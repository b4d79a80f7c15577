"""What one service has served since this picker started: latency by length of prompt and output, and work by tenant.

Problem: one histogram of TTFT mixes prompts of 100 and of 100,000 tokens. Cost per request or token must count what
was served: what was rejected, failed or left costs as much GPU time, but it is no product.

Idea: count each response when Envoy reports its successful end, with the tokens that admission control estimated for
it. Lengths fall into four classes each. Tenants have series of their own up to a limit; all others share one.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Final

import msgspec
from prometheus_client import Counter, Histogram

from plimsoll.telemetry import gateway_metrics

PROMPT_CLASSES: Final = ((1024, "0-1k"), (8192, "1k-8k"), (32768, "8k-32k"))
OUTPUT_CLASSES: Final = ((64, "0-64"), (256, "64-256"), (1024, "256-1k"))
LONGEST_PROMPT: Final = "32k+"
LONGEST_OUTPUT: Final = "1k+"
MAX_NAMED_TENANTS: Final = 50  # of one service at one gateway
MAX_TENANT_CHARS: Final = 100
OTHER_TENANTS: Final = "other tenants"


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


class ServedStats:
    """The counters of one service. A service without `slo` has none: nothing estimates its tokens."""

    def __init__(self, service: str) -> None:
        self._service = service
        self._queue = gateway_metrics.GATEWAY_QUEUE_TIME.labels(service)
        self._ttft: dict[str, Histogram] = {}
        self._tpot: dict[str, Histogram] = {}
        self._tenants: set[str] = set()
        self._counts: defaultdict[tuple[Counter, tuple[str, ...]], float] = defaultdict(float)

    def record(self, served: ServedRequest) -> None:
        """Count a successful response."""
        self._queue.observe(served.queued_s)
        if served.is_stream:
            prompt = length_class(served.prompt_tokens, PROMPT_CLASSES, LONGEST_PROMPT)
            _child(self._ttft, gateway_metrics.GATEWAY_TTFT_BY_PROMPT, self._service, prompt).observe(served.ttft_s)
        if (tpot_s := served.tpot_s) is not None:
            output = length_class(served.output_tokens // served.sequences, OUTPUT_CLASSES, LONGEST_OUTPUT)
            _child(self._tpot, gateway_metrics.GATEWAY_TPOT_BY_OUTPUT, self._service, output).observe(tpot_s)
        tenant = self._label(served.tenant)
        self._add(gateway_metrics.GATEWAY_SERVED_REQUESTS, 1, tenant)
        self._add(gateway_metrics.GATEWAY_SERVED_WORK, served.work_s, tenant)
        self._add(gateway_metrics.GATEWAY_SERVED_TOKENS, served.prompt_tokens * served.sequences, tenant, "prompt")
        self._add(gateway_metrics.GATEWAY_SERVED_TOKENS, served.output_tokens, tenant, "output")
        if served.is_within_slo:
            self._add(gateway_metrics.GATEWAY_GOODPUT_TOKENS, served.output_tokens)

    def update_metrics(self) -> None:
        """Update the counters of `/metrics` just before they are read."""
        counts, self._counts = self._counts, defaultdict(float)
        for (counter, labels), count in counts.items():
            counter.labels(self._service, *labels).inc(count)

    def _add(self, counter: Counter, count: float, *labels: str) -> None:
        self._counts[counter, labels] += count

    def _label(self, tenant: str) -> str:
        if tenant in self._tenants:
            return tenant
        if len(self._tenants) >= MAX_NAMED_TENANTS or len(tenant) > MAX_TENANT_CHARS:
            return OTHER_TENANTS
        self._tenants.add(tenant)
        return tenant


def length_class(tokens: int, classes: tuple[tuple[int, str], ...], longest: str) -> str:
    """Returns the class of a length: the first whose bound it does not exceed."""
    return next((name for bound, name in classes if tokens <= bound), longest)


def _child(children: dict[str, Histogram], histogram: Histogram, service: str, label: str) -> Histogram:
    child = children.get(label)
    if child is None:
        child = children[label] = histogram.labels(service, label)
    return child
