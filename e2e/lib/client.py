"""One request, sent and written down.

Problem: the ledger must know exactly what came over the wire, and the traffic of tests must never leave this machine.
Idea: a thin aiohttp call that notes everything into `Seen`, whatever happens to the transfer, and a `Target` that
cannot be built for another host than 127.0.0.1.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from dataclasses import dataclass
from urllib.parse import urlsplit

import aiohttp

from e2e.lib.request_log import RequestRecord, RequestResult, ResponseTrace, SseParser, classify

CLIENT_TIMEOUT_S = 120.0
_numbers = itertools.count()
_RUN = f"{os.getpid():x}{int(time.time()):x}"


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go and which model they name. Raises ValueError for any host but 127.0.0.1."""

    url: str
    model: str

    def __post_init__(self) -> None:
        if urlsplit(self.url).hostname != "127.0.0.1":
            raise ValueError(f"load only goes to 127.0.0.1, not to {self.url}")


@dataclass(frozen=True, slots=True)
class Prompt:
    """What one request asks: a text, the exact number of output tokens, chat or plain completion, streamed or whole.

    `headers` are sent besides; `labels` are for whoever reads the record, and are not sent. `model` replaces the
    target's.
    """

    text: str
    max_tokens: int = 16
    chat: bool = True
    stream: bool = True
    headers: tuple[tuple[str, str], ...] = ()
    labels: tuple[tuple[str, str], ...] = ()
    model: str = ""

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def body(self, model: str) -> dict[str, object]:
        asks: dict[str, object] = (
            {"messages": [{"role": "user", "content": self.text}]} if self.chat else {"prompt": self.text}
        )
        return {
            "model": self.model or model,
            **asks,
            "max_tokens": self.max_tokens,
            "ignore_eos": True,
            "temperature": 0,
            **({"stream": True, "stream_options": {"include_usage": True}} if self.stream else {}),
        }


def session() -> aiohttp.ClientSession:
    """A session for a load: connections unbounded, our own time limit, no proxy from the environment."""
    connector = aiohttp.TCPConnector(limit=0)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None), trust_env=False)


async def send(
    http: aiohttp.ClientSession, target: Target, prompt: Prompt, source: str, patience_s: float = CLIENT_TIMEOUT_S
) -> RequestRecord:
    """Sends one request and returns its record; no failure of the request raises."""
    request_id = f"{source}-{_RUN}-{next(_numbers)}"
    trace_seen, details, sent_at = ResponseTrace(), [], time.time()
    try:
        async with asyncio.timeout(patience_s):
            details.append(await _exchange(http, target, prompt, request_id, trace_seen))
    except TimeoutError:
        trace_seen.timed_out = True
        details.append(f"no end after {patience_s:.0f} s")
    except (aiohttp.ClientError, ConnectionError, ValueError) as error:
        trace_seen.transport_error = f"{type(error).__name__}: {error}"
    ended_at = time.time()
    outcome = classify(trace_seen, prompt.max_tokens)
    return RequestRecord(
        id=request_id,
        source=source,
        model=prompt.model or target.model,
        sent_at=sent_at,
        ended_at=ended_at,
        ttft_s=trace_seen.first_byte_at - sent_at if trace_seen.first_byte_at else None,
        status=trace_seen.status,
        outcome=outcome,
        asked_tokens=prompt.max_tokens,
        prompt_tokens=trace_seen.prompt_tokens,
        output_tokens=trace_seen.output_tokens,
        finish_reason=trace_seen.finish_reason,
        events=trace_seen.events,
        text="".join(trace_seen.text),
        detail=""
        if outcome is RequestResult.OK
        else " ".join(filter(None, [*details, trace_seen.error_event, trace_seen.transport_error]))[:500],
        tpot_s=trace_seen.tpot_s,
        responding_model=trace_seen.responding_model,
        reason=trace_seen.reason,
        retry_after_s=trace_seen.retry_after_s,
        labels=prompt.labels,
    )


async def _exchange(
    http: aiohttp.ClientSession, target: Target, prompt: Prompt, request_id: str, trace_seen: ResponseTrace
) -> str:
    """Fills `seen`; returns the words of a refusal."""
    headers = {**dict(prompt.headers), "x-request-id": request_id}
    async with http.post(target.url + prompt.path, json=prompt.body(target.model), headers=headers) as response:
        trace_seen.status = response.status
        if response.status != 200:
            retry = response.headers.get("retry-after") or response.headers.get("x-should-retry")
            trace_seen.reason = response.headers.get("x-plimsoll-reason", "")
            trace_seen.retry_after_s = _seconds(response.headers.get("retry-after"))
            return f"retry={retry} {(await response.text())[:300]}"
        if not prompt.stream:
            trace_seen.add_response(await response.json(), time.time())
            return ""
        events = SseParser()
        async for chunk in response.content.iter_any():
            now = time.time()
            trace_seen.first_byte_at = trace_seen.first_byte_at or now
            for data in events.feed(chunk):
                trace_seen.add_event(data, now)
    return ""


def _seconds(header: str | None) -> float | None:
    """`Retry-After` in seconds; None where there is none or it is a date."""
    return float(header) if header and header.isdigit() else None
