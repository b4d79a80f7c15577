"""The ledger: one flat record for every request sent, and the one rule that says whether it went well.

Problem: a broken stream looks like success to every SDK. A 200 that ends without `[DONE]`, a `finish_reason`
of `abort`, an error event inside a 200, an answer that is a token short: none of them is an exception anywhere.
Idea: send every request with `ignore_eos` and a fixed `max_tokens`, so that the right answer has exactly one
length; note what was seen on the wire (`Seen`) and let one pure function (`judge`) name the outcome. Only `OK`
is success; the kinds of failure stay apart because they point to different culprits.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any


class RequestResult(StrEnum):
    """How one request ended."""

    OK = "ok"
    REJECTED = "refused"  # answered with another status than 200
    UNREACHABLE = "unreachable"  # no status at all: refused or reset before the answer began
    CUT = "cut"  # a 200 whose transfer broke
    ERROR_EVENT = "error_event"  # a 200 that carried `data: {"error": ...}`
    NO_DONE = "no_done"  # a 200 that ended cleanly, without `[DONE]`
    ABORTED = "aborted"  # any finish_reason but `length`
    SHORT = "short"  # not the number of tokens that was asked for
    TIMEOUT = "timeout"  # our own patience ended


@dataclass(slots=True)
class ResponseTrace:
    """What was seen on the wire of one request, filled as it goes."""

    status: int | None = None
    responding_model: str = ""  # by the response's own word
    done: bool = False
    events: int = 0
    error_event: str = ""
    finish_reason: str | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    text: list[str] = field(default_factory=list)
    first_byte_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    reason: str = ""  # of a refusal, as its header has it
    retry_after_s: float | None = None
    transport_error: str = ""  # what the transport said, if it broke
    timed_out: bool = False

    def add_event(self, data: str, at: float | None = None) -> None:
        """Notes one server-sent event's data, which came at `at` (Unix s).

        Raises ValueError if it is neither `[DONE]` nor a JSON object.
        """
        self.events += 1
        if data == "[DONE]":
            self.done = True
            return
        event = json.loads(data)
        if not isinstance(event, dict):
            raise ValueError(f"event is no object: {data[:80]}")
        if event.get("error"):
            self.error_event = json.dumps(event["error"])[:300]
        self.responding_model = event.get("model") or self.responding_model
        if usage := event.get("usage"):
            self.prompt_tokens, self.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        for choice in event.get("choices") or []:
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            if words := choice.get("text") or (choice.get("delta") or {}).get("content") or "":
                self.text.append(words)
                self.first_token_at = self.first_token_at or at
                self.last_token_at = at

    def add_response(self, body: dict[str, Any], at: float) -> None:
        """Notes a response that was not streamed, which was complete at `at` (Unix s). It has no time of a token.

        Raises ValueError if it is no completion.
        """
        try:
            usage, [choice] = body["usage"], body["choices"]
            self.prompt_tokens, self.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
            self.finish_reason = choice["finish_reason"]
            self.responding_model = body["model"]
        except (KeyError, TypeError) as error:
            raise ValueError(f"response is no completion: {str(body)[:80]}") from error
        self.text.append(choice.get("text") or (choice.get("message") or {}).get("content") or "")
        self.first_byte_at, self.done = at, True

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds of a token after the first, None for fewer than two tokens or where times are not known."""
        if self.output_tokens < 2 or self.first_token_at is None or self.last_token_at is None:
            return None
        return (self.last_token_at - self.first_token_at) / (self.output_tokens - 1)


def classify(trace: ResponseTrace, asked_tokens: int) -> RequestResult:
    """The outcome of a request that asked for `asked_tokens` tokens with `ignore_eos`."""
    if trace.timed_out:
        return RequestResult.TIMEOUT
    if trace.status is None:
        return RequestResult.UNREACHABLE
    if trace.status != 200:
        return RequestResult.REJECTED
    checks = (
        (bool(trace.error_event), RequestResult.ERROR_EVENT),  # before `broke`: the middleware sends both
        (bool(trace.transport_error), RequestResult.CUT),
        (not trace.done, RequestResult.NO_DONE),
        (trace.finish_reason != "length", RequestResult.ABORTED),
        (trace.output_tokens != asked_tokens, RequestResult.SHORT),
    )
    return next((outcome for failed, outcome in checks if failed), RequestResult.OK)


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request. Times are seconds since the epoch, so that they compare with what Kubernetes writes."""

    id: str
    source: str
    model: str
    sent_at: float
    ended_at: float
    ttft_s: float | None
    status: int | None
    outcome: RequestResult
    asked_tokens: int
    prompt_tokens: int
    output_tokens: int
    finish_reason: str | None
    events: int
    text: str
    detail: str
    tpot_s: float | None = None
    responding_model: str = ""  # by the response's own word; empty without a response
    reason: str = ""  # of a refusal
    retry_after_s: float | None = None
    labels: tuple[tuple[str, str], ...] = ()  # what the plan says of the request

    @property
    def ok(self) -> bool:
        return self.outcome is RequestResult.OK

    def overlaps(self, begin: float, end: float) -> bool:
        """Whether the request was under way at any time from `begin` to `end`."""
        return self.sent_at <= end and self.ended_at >= begin

    def line(self, origin: float) -> str:
        """One line for a report, with times counted from `origin`."""
        sent, ended = self.sent_at - origin, self.ended_at - origin
        return (
            f"{self.id} {self.source} {self.model} sent +{sent:.2f}s ended +{ended:.2f}s "
            f"{self.outcome} status={self.status} tokens={self.output_tokens}/{self.asked_tokens} {self.detail}"
        )


class SseParser:
    """Cuts a byte stream into the data of server-sent events, whatever the chunks' borders."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> Iterator[str]:
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip().decode()


class RequestLog:
    """Every record of one load or prober; safe to read while it grows."""

    def __init__(self, records: Iterable[RequestRecord] = ()) -> None:
        self._records = list(records)
        self._lock = threading.Lock()

    def add(self, record: RequestRecord) -> None:
        with self._lock:
            self._records.append(record)

    @property
    def records(self) -> list[RequestRecord]:
        with self._lock:
            return list(self._records)

    def since(self, when: float) -> RequestLog:
        """The records sent at or after `when`."""
        return RequestLog(r for r in self.records if r.sent_at >= when)

    @property
    def failures(self) -> list[RequestRecord]:
        return [r for r in self.records if not r.ok]

    @property
    def prompt_tokens(self) -> int:
        return sum(r.prompt_tokens for r in self.records)

    def most_at_engines(self) -> int:
        """The most requests that had a token and not yet their end at one time, and so were at engines."""
        at_engines = [(r.sent_at + r.ttft_s, r.ended_at) for r in self.records if r.ok and r.ttft_s is not None]
        steps = sorted([(begin, 1) for begin, _ in at_engines] + [(end, -1) for _, end in at_engines])
        return max(itertools.accumulate((step for _, step in steps), initial=0))

    def totals(self) -> dict[str, Any]:
        """Counts by outcome, tokens and latency percentiles (seconds) of what went well; for reports."""
        records = self.records
        ttfts = sorted(r.ttft_s for r in records if r.ok and r.ttft_s is not None)
        succeeded = sorted(r.ended_at - r.sent_at for r in records if r.ok)
        return {
            "sent": len(records),
            "ok": sum(r.ok for r in records),
            "failed": dict(Counter(str(r.outcome) for r in records if not r.ok)),
            "prompt_tokens": sum(r.prompt_tokens for r in records),
            "output_tokens": sum(r.output_tokens for r in records),
            "ttft_p50_s": nearest_rank(ttfts, 50),
            "ttft_p95_s": nearest_rank(ttfts, 95),
            "duration_p50_s": nearest_rank(succeeded, 50),
            "duration_p95_s": nearest_rank(succeeded, 95),
        }

    def summary(self) -> str:
        """One line for people."""
        t = self.totals()
        failed = ", ".join(f"{n} {kind}" for kind, n in t["failed"].items()) or "none failed"
        ttft = f", TTFT p50 {t['ttft_p50_s']:.3f} s p95 {t['ttft_p95_s']:.3f} s" if t["ttft_p50_s"] is not None else ""
        tokens = f"{t['prompt_tokens']} prompt and {t['output_tokens']} output tokens"
        return f"{t['ok']} of {t['sent']} requests ok ({failed}), {tokens}{ttft}"

    def explain(self, limit: int = 20) -> str:
        """The failures, a line each, for an assertion's message."""
        records = self.records
        origin = min((r.sent_at for r in records), default=0.0)
        lines = [r.line(origin) for r in records if not r.ok]
        more = [f"... and {len(lines) - limit} more"] if len(lines) > limit else []
        return "\n".join([self.summary(), *lines[:limit], *more])

    def dump(self) -> str:
        """JSON lines, one record each, without the texts."""
        rows = ({k: v for k, v in asdict(r).items() if k not in ("text", "labels")} for r in self.records)
        return "".join(json.dumps(row) + "\n" for row in rows)


def nearest_rank(ordered: list[float], q: int) -> float | None:
    """The nearest-rank q-th percentile of an ordered list, None if it is empty."""
    if not ordered:
        return None
    return ordered[max(0, -(-q * len(ordered) // 100) - 1)]
