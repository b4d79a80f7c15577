"""HTTP requests to stores of models, with the standard library, because an engine image may have nothing else.

Credentials are never sent to another host by a redirect, and no redirect leads from TLS to plain HTTP.
"""

from __future__ import annotations

import http.client
import os
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Final
from xml.etree import ElementTree

from launcher.model_source import SourceError, TransientError

TIMEOUT_SECONDS: Final = 60.0  # without a byte
MAX_DOCUMENT_BYTES: Final = 8 << 20
MAX_ERROR_BYTES: Final = 4096
_TRANSIENT: Final = (408, 425, 429, 500, 502, 503, 504)
_UNREACHABLE: Final = (OSError, http.client.HTTPException)


class _SameSecurity(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, req, fp, code, msg, headers, newurl):  # type: ignore[no-untyped-def]
        if req.full_url.startswith("https:") and not newurl.startswith("https:"):
            raise SourceError(f"{req.full_url} redirects to plain HTTP")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _context() -> ssl.SSLContext:
    """The system's authorities, or those of the file that AWS_CA_BUNDLE names."""
    return ssl.create_default_context(cafile=os.environ.get("AWS_CA_BUNDLE") or None)


def request(
    url: str, headers: Mapping[str, str], *, method: str = "GET", body: bytes | None = None, direct: bool = False
) -> http.client.HTTPResponse:
    """Send a request and return the answer with status 2xx; raises SourceError or TransientError.

    direct: past any proxy of the environment, for addresses that exist on the node only.
    """
    outgoing = urllib.request.Request(url, data=body, method=method)
    for name, value in headers.items():
        outgoing.add_unredirected_header(name, value)
    handlers = [_SameSecurity(), urllib.request.HTTPSHandler(context=_context())]
    opener = urllib.request.build_opener(*handlers, *([urllib.request.ProxyHandler({})] if direct else []))
    shown = url.partition("?")[0]
    try:
        answer: http.client.HTTPResponse = opener.open(outgoing, timeout=TIMEOUT_SECONDS)
    except urllib.error.HTTPError as error:
        words = f"{shown} answers {error.code} {_reason(error)}".rstrip()
        raise (TransientError if error.code in _TRANSIENT else SourceError)(words) from None
    except ssl.SSLCertVerificationError as error:
        raise SourceError(f"{shown} has no trusted certificate: {error.verify_message}") from None
    except urllib.error.URLError as error:
        if isinstance(error.reason, ssl.SSLCertVerificationError):
            raise SourceError(f"{shown} has no trusted certificate: {error.reason.verify_message}") from None
        raise TransientError(f"{shown} cannot be reached: {error.reason}") from None
    except _UNREACHABLE as error:
        raise TransientError(f"{shown} cannot be reached: {error}") from None
    return answer


def document(
    url: str, headers: Mapping[str, str], *, method: str = "GET", body: bytes | None = None, direct: bool = False
) -> bytes:
    """Send a request and return its whole answer; raises SourceError or TransientError."""
    try:
        with request(url, headers, method=method, body=body, direct=direct) as answer:
            text = answer.read(MAX_DOCUMENT_BYTES + 1)
    except _UNREACHABLE as error:
        raise TransientError(f"{url.partition('?')[0]} breaks off: {error}") from None
    if len(text) > MAX_DOCUMENT_BYTES:
        raise SourceError(f"{url.partition('?')[0]} answers more than {MAX_DOCUMENT_BYTES} bytes")
    return text


def parse_xml(text: bytes) -> ElementTree.Element:
    """Parse an answer of a store without its namespaces; raises SourceError. Entities are refused."""
    if b"<!DOCTYPE" in text or b"<!ENTITY" in text:
        raise SourceError("the store answers XML with a document type")
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise SourceError(f"the store answers no XML: {error}") from None
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
    return root


def _reason(error: urllib.error.HTTPError) -> str:
    """Return code and message of a store's XML error, else the phrase of the status."""
    try:
        found = parse_xml(error.read(MAX_ERROR_BYTES))
    except (SourceError, *_UNREACHABLE):
        return str(error.reason)
    code, message = found.findtext(".//Code"), found.findtext(".//Message")
    return ": ".join(part for part in (code, message) if part) or str(error.reason)
