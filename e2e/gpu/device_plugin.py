"""The devices of this machine as `nvidia.com/gpu`: a kubelet device plugin in one file, without generated code.

    python -m e2e.gpu.device_plugin SOCKETS --mount FOLDER ... [--fake N]

Problem: the vendor's plugin wants the vendor's container runtime, and neither can be had without a registry.
Idea: kubelet's plugin API (v1beta1) is four small messages. A container that asks for a GPU gets the device nodes, the
variables that choose the card, and read-only mounts of this machine's folders: driver libraries and what the base of
the engine's image would hold. `--fake N` advertises N devices that do not exist, to rehearse without a GPU.
"""

from __future__ import annotations

import argparse
import re
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import grpc

RESOURCE: Final = "nvidia.com/gpu"
_VERSION: Final = "v1beta1"
_SOCKET: Final = "plimsoll-gpus.sock"
_CONTROL: Final = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools")  # each container with a card gets them
_VARINT, _BYTES = 0, 2  # protobuf's wire types


def text_field(number: int, value: str | bytes) -> bytes:
    """A protobuf field of bytes: text, or a message."""
    raw = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | _BYTES) + _varint(len(raw)) + raw


def true_field(number: int) -> bytes:
    """A protobuf field that is true."""
    return _varint(number << 3 | _VARINT) + b"\x01"


def _varint(value: int) -> bytes:
    raw = bytearray()
    while value > 0x7F:
        raw.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*raw, value])


def read_fields(raw: bytes) -> Iterator[tuple[int, bytes]]:
    """Number and bytes of each field; of a number its value is dropped. Raises ValueError for other wire types."""
    place = 0
    while place < len(raw):
        tag, place = _read_varint(raw, place)
        value, place = _read_varint(raw, place)
        if tag & 7 == _BYTES:
            yield tag >> 3, raw[place : place + value]
            place += value
        elif tag & 7 != _VARINT:
            raise ValueError(f"wire type {tag & 7}")


def _read_varint(raw: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = raw[place]
        value |= (byte & 0x7F) << shift
        place, shift = place + 1, shift + 7
        if byte < 0x80:
            return value, place


def devices() -> list[str]:
    """The numbers of the cards, as their device nodes have them."""
    found = (re.fullmatch(r"nvidia(\d+)", path.name) for path in Path("/dev").glob("nvidia*"))
    return sorted((match[1] for match in found if match), key=int)


def list_response(ids: Iterable[str]) -> bytes:
    """All devices, healthy."""
    return b"".join(text_field(1, text_field(1, name) + text_field(2, "Healthy")) for name in ids)


def allocate_response(request: bytes, mounts: Sequence[str], fake: bool) -> bytes:
    """For each container of the request what it gets with its devices."""
    answers = []
    for _, container in read_fields(request):
        ids = [value.decode() for number, value in read_fields(container) if number == 1]
        variables = {"NVIDIA_VISIBLE_DEVICES": ",".join(ids), "CUDA_VISIBLE_DEVICES": ",".join(ids)}
        if not fake:  # CUDA counts the device nodes that it finds
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(str(number) for number in range(len(ids)))
        nodes = [] if fake else [f"/dev/{name}" for name in (*(f"nvidia{card}" for card in ids), *_CONTROL)]
        answer = b"".join(
            text_field(1, text_field(1, name) + text_field(2, value)) for name, value in variables.items()
        )
        answer += b"".join(text_field(2, text_field(1, path) + text_field(2, path) + true_field(3)) for path in mounts)
        answer += b"".join(
            text_field(3, text_field(1, path) + text_field(2, path) + text_field(3, "rw"))
            for path in nodes
            if Path(path).exists()
        )
        answers.append(text_field(1, answer))
    return b"".join(answers)


def serve(sockets: Path, ids: Sequence[str], mounts: Sequence[str], fake: bool) -> None:
    """Register with kubelet and answer it, again when it has restarted; never returns."""
    never = threading.Event()

    def list_and_watch(_request: bytes, _context: object) -> Iterator[bytes]:
        yield list_response(ids)
        never.wait()

    handlers: dict[str, Any] = {
        "GetDevicePluginOptions": grpc.unary_unary_rpc_method_handler(lambda _request, _context: b""),
        "ListAndWatch": grpc.unary_stream_rpc_method_handler(list_and_watch),
        "Allocate": grpc.unary_unary_rpc_method_handler(
            lambda request, _context: allocate_response(request, mounts, fake)
        ),
        "PreStartContainer": grpc.unary_unary_rpc_method_handler(lambda _request, _context: b""),
    }
    own, kubelet = sockets / _SOCKET, sockets / "kubelet.sock"
    socket_created = 0.0
    server: grpc.Server | None = None
    while True:
        if kubelet.exists() and kubelet.stat().st_ctime != socket_created:
            socket_created = kubelet.stat().st_ctime
            if server:
                server.stop(None)
            own.unlink(missing_ok=True)
            server = grpc.server(ThreadPoolExecutor(8))
            server.add_generic_rpc_handlers(
                (grpc.method_handlers_generic_handler(f"{_VERSION}.DevicePlugin", handlers),)
            )
            server.add_insecure_port(f"unix://{own}")
            server.start()
            _register(kubelet)
            print(f"registered {len(ids)} devices as {RESOURCE}", flush=True)
        time.sleep(0.2)


def _register(kubelet: Path) -> None:
    request = text_field(1, _VERSION) + text_field(2, _SOCKET) + text_field(3, RESOURCE)
    with grpc.insecure_channel(f"unix://{kubelet}") as channel:
        channel.unary_unary(f"/{_VERSION}.Registration/Register")(request, timeout=10, wait_for_ready=True)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m e2e.gpu.device_plugin", description=__doc__)
    parser.add_argument("sockets", type=Path, help="kubelet's folder device-plugins")
    parser.add_argument("--mount", action="append", default=[], help="a folder of this machine, under its own path")
    parser.add_argument("--fake", type=int, default=0, help="so many devices that do not exist")
    given = parser.parse_args(words)
    ids = [str(number) for number in range(given.fake)] or devices()
    if not ids:
        print("no /dev/nvidia0 here; --fake N advertises devices that do not exist", file=sys.stderr)
        return 1
    serve(given.sockets, ids, given.mount, bool(given.fake))
    return 0


if __name__ == "__main__":
    sys.exit(main())
