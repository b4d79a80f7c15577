"""The two files that the demo leaves: a line for each request as its client saw it, a line for each look at a tier.

Problem: a report is worth as much as what it can be checked against. Idea: every figure is a function of these lines
and of the run's facts (`figures.py`), so that whoever doubts one computes it again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from e2e.lib.request_log import RequestRecord, RequestResult

SHED: Final = "shed"  # the gateway said: not now
SHED_STATUS: Final = frozenset({429, 503, 504})
_PRECISION: Final = 4


@dataclass(frozen=True, slots=True)
class RequestLine:
    """One request. Times are in seconds; `sent_s` and `ended_s` count from the run's start.

    outcome: `ok`; `shed` (429, 503 or 504); `refused` (another status); else how the stream broke, as in
    `e2e.lib.request_log`. reason: the gateway's reason for a rejection.
    """

    id: str
    run: str
    request_class: str
    tenant: str
    sent_s: float
    ended_s: float
    prompt_tokens: int
    output_tokens_asked: int
    status: int | None
    outcome: str
    reason: str
    retry_after_s: float | None
    ttft_s: float | None
    tpot_s: float | None
    output_tokens: int
    finish_reason: str | None

    @property
    def shed(self) -> bool:
        return self.outcome == SHED

    @property
    def rejected(self) -> bool:
        """Never began to be answered: nothing was promised."""
        return self.outcome in (SHED, str(RequestResult.REJECTED))

    @property
    def broken(self) -> bool:
        """Was accepted, or got no answer at all, and did not end as it should."""
        return not self.rejected and not self.client_gone and self.outcome != str(RequestResult.OK)

    @property
    def client_gone(self) -> bool:
        """The client's own patience ended: missed, and no fault of the stream."""
        return self.outcome == str(RequestResult.TIMEOUT)


@dataclass(frozen=True, slots=True)
class ReplicaSample:
    """One look at one tier: `t_s` seconds after the run's start. `starting`: ordered or there, and not ready."""

    run: str
    t_s: float
    tier: str
    desired: int
    ready: int
    starting: int
    draining: int

    @property
    def billed(self) -> int:
        """Replicas that cost GPU time: from the order to the pod's end."""
        return self.ready + self.starting + self.draining


def request_line(record: RequestRecord, run: str, origin: float) -> RequestLine:
    """A record as a line; `origin` is the run's start (Unix s). A refused request has its plan's prompt tokens."""
    labels = dict(record.labels)
    shed = record.outcome is RequestResult.REJECTED and record.status in SHED_STATUS
    return RequestLine(
        id=record.id,
        run=run,
        request_class=labels.get("class", ""),
        tenant=labels.get("tenant", ""),
        sent_s=round(record.sent_at - origin, _PRECISION),
        ended_s=round(record.ended_at - origin, _PRECISION),
        prompt_tokens=record.prompt_tokens or int(labels.get("prompt_tokens", 0)),
        output_tokens_asked=record.asked_tokens,
        status=record.status,
        outcome=SHED if shed else str(record.outcome),
        reason=record.reason,
        retry_after_s=record.retry_after_s,
        ttft_s=_rounded(record.ttft_s),
        tpot_s=_rounded(record.tpot_s),
        output_tokens=record.output_tokens,
        finish_reason=record.finish_reason,
    )


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, _PRECISION + 1)


def write(path: Path, rows: Iterable[RequestLine] | Iterable[ReplicaSample]) -> None:
    """JSON lines; `class` is the key of a request's class."""
    path.parent.mkdir(parents=True, exist_ok=True)
    dicts = ({_JSON_KEYS.get(key, key): value for key, value in asdict(row).items()} for row in rows)
    path.write_text("".join(json.dumps(row) + "\n" for row in dicts))


def read_requests(path: Path) -> list[RequestLine]:
    """The lines of requests.jsonl."""
    return [RequestLine(**_fields(line)) for line in path.read_text().splitlines()]


def read_replicas(path: Path) -> list[ReplicaSample]:
    """The lines of replicas.jsonl."""
    return [ReplicaSample(**_fields(line)) for line in path.read_text().splitlines()]


_JSON_KEYS: Final = {"request_class": "class"}
_FIELD_NAMES: Final = {key: name for name, key in _JSON_KEYS.items()}


def _fields(line: str) -> dict[str, Any]:
    return {_FIELD_NAMES.get(key, key): value for key, value in json.loads(line).items()}
