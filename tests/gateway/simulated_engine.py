"""An engine simulator under its launcher, as a process on loopback for a real gateway."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from launcher.contract import IMAGE_ROOT
from plimsoll.api.contract import engine_tls_name
from tests.gateway.stack import wait_until
from tests.ports import free_ports

FLAGS = ("--time-scale", "0.1", "--max-model-len", "4096")
TASK_FLAGS = {"generate": (), "embed": ("--runner", "pooling"), "transcribe": ()}


@asynccontextmanager
async def simulated_engine(
    folder: Path,
    service: str,
    task: str,
    adapters: Path | None = None,
    flags: tuple[str, ...] = (),
    tls: Path | None = None,
) -> AsyncIterator[str]:
    """A ready engine of the service NAMESPACE/NAME, with an existing folder; gives its address as host:port.

    Its log is the folder's `log`.

    adapters: the folder with the desired LoRA adapters, for an engine with LoRA. tls: the mounted Secret of an engine
    that requires mutual TLS.
    """
    api, launcher, nixl = free_ports(3)
    document = json.loads((IMAGE_ROOT / "contract.json").read_text())
    document["ports"] = {"api": api, "launcher": launcher, "nixl": nixl}
    document["paths"].update(state=str(folder / "state"), termination_message=str(folder / "said"))
    if tls is not None:
        document["paths"]["tls"] = str(tls)
    if adapters is not None:
        document["paths"]["adapters"] = str(adapters)
    document["drain"].update(min_handover_seconds=0, quiet_seconds=0)
    (folder / "contract.json").write_text(json.dumps(document))
    environment = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join((str(IMAGE_ROOT), str(IMAGE_ROOT.parent / "operator"))),
        "PLIMSOLL_CONTRACT": str(folder / "contract.json"),
        "PLIMSOLL_RUNTIME": "simulated",
        "PLIMSOLL_MODEL": "org/m",
        "PLIMSOLL_TASK": task,
        "PLIMSOLL_SHUTDOWN_TIMEOUT_SECONDS": "1",
        "PLIMSOLL_SERVED_NAMES": json.dumps([service]),
        "PLIMSOLL_ARGS": json.dumps([*FLAGS, *TASK_FLAGS[task], *flags]),
    }
    if tls is not None:
        namespace = service.partition("/")[0]
        document = {"secret": f"{namespace}/engine-tls", "name": engine_tls_name(namespace), "release": "plimsoll"}
        environment["PLIMSOLL_TLS"] = json.dumps(document)
    if adapters is not None:
        environment["PLIMSOLL_LORA"] = json.dumps({"max_loras": 2, "max_lora_rank": 16, "max_cpu_loras": 8})
    with (folder / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "launcher", env=environment, cwd=folder, stdout=log, stderr=log
        )

    def is_ready() -> bool:
        text = (folder / "log").read_text(errors="replace")
        assert process.returncode is None, text
        return "ready after" in text

    try:
        await wait_until(is_ready, "the engine is ready")
        yield f"127.0.0.1:{api}"
        process.terminate()
        await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
