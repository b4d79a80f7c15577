"""This machine's pip settings, as build arguments: pip works inside a build as it does outside.

A folder of wheels (PIP_FIND_LINKS) is no use by its path inside a build, so it is served on the loopback while the
build runs, always on the same port: another argument would be another build to Docker's cache.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from e2e.cluster.settings import WHEELS_PORT

_PASSED_ON = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_TRUSTED_HOST", "PIP_DEFAULT_TIMEOUT")
_LINKS = "PIP_FIND_LINKS"
_CERT = "PIP_CERT"
_BUNDLE = "/etc/ssl/certs/ca-certificates.crt"  # the one path that means the same in a Debian image


@contextmanager
def settings(environment: Mapping[str, str] = os.environ) -> Iterator[dict[str, str]]:
    """Build arguments, good while the context lasts; builds that use them need the host's network."""
    passed_on = {name: environment[name] for name in _PASSED_ON if environment.get(name)}
    if environment.get(_CERT) == _BUNDLE:
        passed_on[_CERT] = _BUNDLE
    links = environment.get(_LINKS, "")
    place = links.removeprefix("file://")
    if "://" in place:
        yield passed_on | {_LINKS: links}
    elif place and Path(place).is_dir() and any(Path(place).iterdir()):
        with _serve_folder(place):
            yield passed_on | {_LINKS: f"http://127.0.0.1:{WHEELS_PORT}/"}
    else:
        yield passed_on


@contextmanager
def _serve_folder(folder: str) -> Iterator[None]:
    with ThreadingHTTPServer(("127.0.0.1", WHEELS_PORT), partial(_QuietHandler, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield
        server.shutdown()


class _QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Says nothing: the build's own log tells what was fetched."""
