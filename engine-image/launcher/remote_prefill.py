"""Remote prefill: another engine computes the prompt, this one reads its KV and decodes.

Problem: a prefill engine may be dead, slow, full, draining, or respond with garbage, and the client must not notice:
this engine can always compute the prompt itself. Idea: a remote prefill is one HTTP call that ends in an outcome, never
in an exception, and only the outcome `remote` has transfer parameters. Its body is the client's with one output token;
the response's parameters are passed on unread. Each call has its own connection, because an idle one that the other
side just closed would look like a dead engine.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import Any

import aiohttp

from launcher import api_formats, request_body
from launcher.tls import EngineTls

ADDRESS_PATTERN = re.compile(r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:]+\]):[0-9]{1,5}")
CONNECT_SECONDS = 2.0  # a node that is gone answers nothing, not even a refusal
MAX_DEADLINE_SECONDS = 3600.0
MAX_RESPONSE_BYTES = 16 * 1024 * 1024
FORWARDED_HEADERS = ("x-request-id", "traceparent", "tracestate")
PRODUCER_PARAMS = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


@dataclass(frozen=True)
class RemotePrefillResult:
    """Result of a remote prefill: an outcome of the contract's list; `params` only if it is `remote`."""

    outcome: str
    params: dict[str, Any] | None = None
    seconds: float | None = None


def is_eligible(request: Any) -> bool:
    """Whether a request can be prefilled remotely: one prompt, one sequence, and no log-probabilities of the prompt.

    Several sequences would each need their own transfer; log-probabilities of the prompt are made where it is computed.
    """
    if not isinstance(request, dict):
        return False
    if request.get("n") not in (None, 1) or request.get("best_of") not in (None, 1) or request.get("use_beam_search"):
        return False
    if request.get("prompt_logprobs") is not None or (request.get("echo") and request.get("logprobs")):
        return False
    if request.get("prompt_embeds") is not None:
        return False
    prompt = request.get("prompt")
    return not isinstance(prompt, list) or len(prompt) == 1 or all(isinstance(token, int) for token in prompt)


def prefill_request_body(body: bytes, request: dict[str, Any], path: str) -> bytes:
    """Return the request for the prefill engine: one token, not streamed, and its KV held for this engine."""
    limit = api_formats.FORMATS[path].output_limit
    fields: dict[str, Any] = {"stream": False, limit: 1, "kv_transfer_params": PRODUCER_PARAMS}
    if path == api_formats.CHAT_PATH or "max_completion_tokens" in request:
        fields["max_completion_tokens"] = 1
    if "stream_options" in request:
        fields["stream_options"] = None
    if "min_tokens" in request:
        fields["min_tokens"] = 0
    return request_body.add_fields(body, fields)


class RemotePrefillClient:
    """Runs remote prefills within a deadline; the first one creates its session inside a running loop."""

    def __init__(self, deadline: float, remote_prefill_header: str, tls: EngineTls | None = None) -> None:
        """`deadline`: seconds, where the gateway names none. `tls`: by which prefill engines know this one; None for
        plain HTTP.
        """
        self._tls = tls
        self._deadline = deadline
        self._remote_prefill_header = remote_prefill_header
        self._session: aiohttp.ClientSession | None = None

    async def run(
        self, address: str, path: str, body: bytes, headers: dict[str, str], deadline: float | None = None
    ) -> RemotePrefillResult:
        """Run one remote prefill at `address` (host:port) on the same path; cancelling it closes its connection.

        `deadline`: its own, in seconds.
        """
        started = time.monotonic()
        if not ADDRESS_PATTERN.fullmatch(address):
            return RemotePrefillResult("invalid_response")
        try:
            status, raw = await self._post(
                f"{'http' if self._tls is None else 'https'}://{address}{path}", body, headers, deadline
            )
        except TimeoutError as error:
            # aiohttp's connect time-out is a TimeoutError as well: nobody is there, rather than slow
            outcome = "unreachable" if isinstance(error, aiohttp.ConnectionTimeoutError) else "timeout"
            return RemotePrefillResult(outcome, seconds=time.monotonic() - started)
        except (aiohttp.ClientError, OSError, ValueError):
            return RemotePrefillResult("unreachable", seconds=time.monotonic() - started)
        seconds = time.monotonic() - started
        if status != 200:
            return RemotePrefillResult("rejected", seconds=seconds)
        params = transfer_params(raw)
        return RemotePrefillResult("remote" if params else "invalid_response", params, seconds)

    async def close(self) -> None:
        """Close open connections."""
        if self._session is not None:
            await self._session.close()

    async def _post(self, url: str, body: bytes, headers: dict[str, str], deadline: float | None) -> tuple[int, bytes]:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
            self._session = aiohttp.ClientSession(connector=connector, auto_decompress=False)
        total = self._deadline if deadline is None else deadline
        timeout = aiohttp.ClientTimeout(total=total, sock_connect=min(CONNECT_SECONDS, total))
        sent_headers = {**headers, "content-type": "application/json", self._remote_prefill_header: "prefill"}
        tls: dict[str, Any] = {}
        if self._tls is not None:
            tls["ssl"], tls["server_hostname"] = self._tls.client()
        async with self._session.post(
            url, data=body, headers=sent_headers, allow_redirects=False, timeout=timeout, **tls
        ) as response:
            raw = (
                await response.content.read(MAX_RESPONSE_BYTES)
                if response.status != 200
                else await _read_bounded(response)
            )
            return response.status, raw


async def _read_bounded(response: aiohttp.ClientResponse) -> bytes:
    chunks, size = [], 0
    async for chunk in response.content.iter_any():
        size += len(chunk)
        if size > MAX_RESPONSE_BYTES:
            raise ValueError("the prefill engine's answer is too long")
        chunks.append(chunk)
    return b"".join(chunks)


def transfer_params(raw: bytes) -> dict[str, Any] | None:
    """Return the transfer parameters in a prefill engine's response; None without usable ones."""
    document = request_body.parse(raw)
    params = document.get(request_body.TRANSFER_PARAMS_KEY) if isinstance(document, dict) else None
    return params if isinstance(params, dict) and params.get("do_remote_prefill") else None


def with_transfer_params(body: bytes, params: dict[str, Any]) -> bytes:
    """Return the client's request with the transfer parameters of its remote prefill."""
    return request_body.add_fields(body, {request_body.TRANSFER_PARAMS_KEY: params})


def deadline_of(text: str) -> float | None:
    """Return the deadline in the gateway's header in seconds; None without a positive number."""
    try:
        seconds = float(text)
    except ValueError:
        return None
    return seconds if 0.0 < seconds < MAX_DEADLINE_SECONDS else None


def forwarded_headers(headers: list[tuple[bytes, bytes]]) -> dict[str, str]:
    """Return the headers of the client's request that the remote prefill gets."""
    return {
        key.decode(): value.decode("latin-1") for key, value in headers if key.decode("latin-1") in FORWARDED_HEADERS
    }
