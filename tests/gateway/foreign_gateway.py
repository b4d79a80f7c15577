"""A gateway of another product: an Envoy with the ext_proc filter, as implementations of InferencePool configure it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from tests.gateway.envoy_binary import ENVOY
from tests.gateway.foreign_envoy import BUFFERED, DUPLEX, Json, envoy_config
from tests.gateway.stack import stop, wait_until
from tests.ports import free_port


class ForeignGateway:
    """One Envoy that asks the endpoint picker at a port of 127.0.0.1. Ends with `stop`."""

    def __init__(self, directory: Path, picker_port: int, mode: Json = DUPLEX, engines: tuple[str, ...] = ()) -> None:
        """`engines` are the endpoints of its cluster; without them it goes to any address that the picker names."""
        self.is_buffered = mode is BUFFERED
        self.port, self.admin_port = free_port(), free_port()
        self.log = directory / f"foreign-{self.port}.log"
        path = directory / f"foreign-{self.port}.json"
        listen, admin, picker = (f"127.0.0.1:{port}" for port in (self.port, self.admin_port, picker_port))
        path.write_text(json.dumps(envoy_config(listen, admin, picker, mode, engines)))
        command = [ENVOY, "-c", str(path), "--concurrency", "1", "--disable-hot-restart", "-l", "warning"]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def stop(self) -> None:
        stop(self.process)
        print(self.log.read_text()[-2000:])


async def wait_listening(gateway: ForeignGateway, http: Any) -> None:
    """Wait until the gateway's Envoy accepts requests."""

    async def is_ready() -> bool:
        try:
            async with http.get(f"http://127.0.0.1:{gateway.admin_port}/ready") as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    await wait_until(is_ready, "the other gateway is ready")
