"""Questions to the local registry, which resets connections while it starts."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread

import pytest

from e2e.cluster import registry
from e2e.cluster.shell import CommandFailed

MANIFEST = b'{"config": {"digest": "sha256:1"}}'
RESET = b""


@contextmanager
def answering(*answers: bytes) -> Iterator[int]:
    """The port of a registry that gives these answers, one a connection, and resets every connection after them."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            left = list(answers)
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(4096)
                    if answer := left.pop(0) if left else RESET:
                        connection.sendall(answer)
                    else:
                        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

        thread = Thread(target=serve)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


def response(status: str, body: bytes = b"") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body


def ask(monkeypatch: pytest.MonkeyPatch, port: int, seconds: float = 30.0) -> bytes | None:
    monkeypatch.setattr(registry, "REGISTRY_PORT", port)
    monkeypatch.setattr(registry, "START_SECONDS", seconds)
    monkeypatch.setattr(registry, "PAUSE_SECONDS", 0.0)
    return registry.manifest("plimsoll/operator", "dev")


def test_manifest_is_read_after_resets_and_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    starting = response("503 Service Unavailable")
    with answering(RESET, RESET, starting, response("200 OK", MANIFEST)) as port:
        assert ask(monkeypatch, port) == MANIFEST


def test_manifest_without_tag_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    with answering(response("404 Not Found")) as port:
        assert ask(monkeypatch, port) is None


def test_manifest_of_resetting_registry_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    with answering() as port, pytest.raises(CommandFailed, match=r"does not answer .*: run e2e/cluster/up first"):
        ask(monkeypatch, port, seconds=0.0)
