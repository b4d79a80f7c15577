"""Fetches a page from a pod over HTTP.

It uses aiohttp because the operator fetches many pages per second: for 500 engines a page takes a tenth of the CPU time
of httpx or less (docs/design/0022-http-client.md).
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import Any, Final

import aiohttp

from plimsoll.adapters.internal_tls import tls_reason
from plimsoll.core.errors import BackendUnavailable, UntrustedPeer, cause_of
from plimsoll.core.units import format_seconds

TIMEOUT_S: Final = 2.0
MAX_ENGINE_PAGE_BYTES: Final = 1 << 20  # vLLM's /metrics has some 100 KB
MAX_GATEWAY_PAGE_BYTES: Final = 16 << 20  # /signals of 2,500 services with 30 engines each
_HEADERS: Final = {"Accept-Encoding": "identity"}  # compression would cost CPU time in the pod
_NO_TIMEOUT: Final = aiohttp.ClientTimeout()  # asyncio.timeout below limits the whole request


async def get_page(
    session: aiohttp.ClientSession,
    address: str,
    port: int,
    path: str,
    tls_name: str = "",
    *,
    max_bytes: int,
    timeout_s: float = TIMEOUT_S,
    tls_context: Callable[[], ssl.SSLContext | None] = lambda: None,
) -> bytes:
    """The body of a pod's response at a path. address: the pod's IP. tls_name: in its certificate, "" for plain HTTP.

    tls_context: of a client that pods with TLS accept, None while there is none.

    Raises UntrustedPeer if a certificate is missing or wrong, on either side, and BackendUnavailable for a status other
    than 200, a truncated or oversized body, and a timeout.
    """
    host = f"[{address}]" if ":" in address else address
    url = f"http{'s' if tls_name else ''}://{host}:{port}{path}"
    tls = dict[str, Any]()
    if tls_name:
        if (context := tls_context()) is None:
            raise UntrustedPeer(
                f"{url} requires TLS, but the Secret of internalTls.secretName is not set or not usable"
            )
        tls = {"ssl": context, "server_hostname": tls_name}
    try:
        async with asyncio.timeout(timeout_s):
            return await _read_body(session, url, max_bytes, tls)
    except TimeoutError:
        raise BackendUnavailable(f"{url} did not answer within {format_seconds(timeout_s)}") from None
    except aiohttp.ClientConnectorCertificateError as error:
        reason = getattr(error.certificate_error, "verify_message", "") or str(error.certificate_error)
        raise UntrustedPeer(f"{url} has no valid certificate for {tls_name}: {reason}") from error
    except (aiohttp.ClientSSLError, ssl.SSLError) as error:
        cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
        reason = tls_reason(cause) if isinstance(cause, ssl.SSLError) else cause_of(cause)
        raise UntrustedPeer(f"{url} does not accept TLS with this client's certificate: {reason}") from error
    except aiohttp.ServerDisconnectedError as error:  # with TLS 1.3, a client whose certificate is refused sees no more
        if tls_name:
            message = f"{url} closed the connection: it may not accept the certificate of internalTls.secretName"
            raise UntrustedPeer(message) from error
        raise BackendUnavailable(f"{url}: {cause_of(error)}") from error
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise BackendUnavailable(f"{url}: {cause_of(error)}") from error


async def _read_body(session: aiohttp.ClientSession, url: str, max_bytes: int, tls: dict[str, Any]) -> bytes:
    body = bytearray()
    async with session.get(url, headers=_HEADERS, timeout=_NO_TIMEOUT, allow_redirects=False, **tls) as response:
        if response.status != 200:
            raise BackendUnavailable(f"{url} answered with {response.status}", response.status)
        async for chunk in response.content.iter_any():
            body += chunk
            if len(body) > max_bytes:
                raise BackendUnavailable(f"{url} answered with more than {max_bytes} bytes")
    return bytes(body)
