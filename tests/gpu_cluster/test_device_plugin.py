"""The messages to kubelet, and a whole registration with a kubelet that is a few lines long."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc
import pytest

from e2e.gpu.device_plugin import allocate_response, list_response, read_fields, text_field, true_field

ROOT = Path(__file__).resolve().parents[2]


def _pairs(raw: bytes) -> dict[str, str]:
    return {text[1].decode(): text[2].decode() for text in [dict(read_fields(raw))]}


def test_long_fields_are_read_as_they_were_written() -> None:
    value = "x" * 70_000
    assert list(read_fields(text_field(3, value) + true_field(2))) == [(3, value.encode())]


def test_devices_are_listed_as_healthy() -> None:
    found = [_pairs(raw) for _, raw in read_fields(list_response(["0", "1"]))]
    assert found == [{"0": "Healthy"}, {"1": "Healthy"}]


def test_a_container_gets_its_cards_and_the_machines_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Path, "exists", lambda _path: True)
    request = text_field(1, text_field(1, "1"))
    ((_, answer),) = read_fields(allocate_response(request, ["/usr"], fake=False))
    fields = list(read_fields(answer))
    variables = dict(pair for number, raw in fields if number == 1 for pair in _pairs(raw).items())
    assert variables == {"NVIDIA_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "0"}
    assert [dict(read_fields(raw))[2] for number, raw in fields if number == 2] == [b"/usr"]
    nodes = [dict(read_fields(raw))[2].decode() for number, raw in fields if number == 3]
    assert nodes == ["/dev/nvidia1", "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"]


def test_devices_that_do_not_exist_have_no_nodes() -> None:
    ((_, answer),) = read_fields(allocate_response(text_field(1, text_field(1, "0")), [], fake=True))
    assert all(number == 1 for number, _ in read_fields(answer))


@pytest.fixture
def sockets() -> Iterator[Path]:
    with TemporaryDirectory(prefix="plug") as folder:  # a socket's path must be short
        yield Path(folder)


def test_the_plugin_registers_and_serves(sockets: Path) -> None:
    seen: list[bytes] = []
    received = threading.Event()

    def register(request: bytes, _context: object) -> bytes:
        seen.append(request)
        received.set()
        return b""

    kubelet = grpc.server(ThreadPoolExecutor(2))
    handlers = {"Register": grpc.unary_unary_rpc_method_handler(register)}
    kubelet.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("v1beta1.Registration", handlers),))
    kubelet.add_insecure_port(f"unix://{sockets}/kubelet.sock")
    kubelet.start()
    command = [sys.executable, "-m", "e2e.gpu.device_plugin", str(sockets), "--fake", "2", "--mount", "/usr"]
    plugin = subprocess.Popen(command, cwd=ROOT)
    try:
        assert received.wait(30)
        fields = dict(read_fields(seen[0]))
        assert (fields[1], fields[3]) == (b"v1beta1", b"nvidia.com/gpu")
        with grpc.insecure_channel(f"unix://{sockets}/{fields[2].decode()}") as channel:
            watch = channel.unary_stream("/v1beta1.DevicePlugin/ListAndWatch")(b"", timeout=10)
            assert next(iter(watch)) == list_response(["0", "1"])
            allocate = channel.unary_unary("/v1beta1.DevicePlugin/Allocate")
            request = text_field(1, text_field(1, "1"))
            assert allocate(request, timeout=10) == allocate_response(request, ["/usr"], fake=True)
    finally:
        plugin.kill()
        plugin.wait()
        kubelet.stop(None)
