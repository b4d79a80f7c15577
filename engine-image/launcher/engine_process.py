"""The engine as a child process.

Problem: vLLM exits 0 when its engine core has died, and leaves grandchildren behind. (Orphans are reaped by the first
process of the container, `start.sh`, which passes signals on to the launcher.) Idea: one SIGCHLD handler reaps all
children; the engine's own end resolves a future. A thread copies its output line by line without secrets (vLLM logs its
arguments) and passes each line to an observer, so that a blocked log reader stops no health check. The engine leads a
process group, which is killed with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from launcher.redaction import redact

LineObserver = Callable[[bytes], None]

LOG_SECONDS = 1.0  # for the rest of the log after the engine's end


class EngineProcess:
    """A running `vllm serve`. `exit` resolves to its exit code, 128 + n if signal n ended it."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._log_thread: threading.Thread | None = None
        self.exit: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def signal(self, number: int) -> None:
        """Send a signal to vLLM itself, which passes it on to its children."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, number)

    def kill(self) -> None:
        """Kill vLLM and its process group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def log_copied(self) -> None:
        """Wait for the last lines of the log, for at most LOG_SECONDS; a grandchild may keep the pipe open."""
        if self._log_thread is not None:
            await asyncio.to_thread(self._log_thread.join, LOG_SECONDS)

    def copy_log(self, source: IO[bytes], observe: LineObserver) -> None:
        """Copies the engine's output in a thread until its end."""
        self._log_thread = threading.Thread(target=_copy_log, args=(source, observe), name="engine-log", daemon=True)
        self._log_thread.start()

    def reap(self) -> None:
        """Reap all ended children; only vLLM's exit code is stored."""
        is_init = os.getpid() == 1
        while True:
            try:
                pid, status = os.waitpid(-1 if is_init else self._process.pid, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._process.pid:
                self._on_exit(os.waitstatus_to_exitcode(status))

    def _on_exit(self, code: int) -> None:
        code = code if code >= 0 else 128 - code
        self._process.returncode = code  # reaped here: Popen must not look for it
        self.kill()
        if not self.exit.done():
            self.exit.set_result(code)


def start_engine(command: Sequence[str], environment: Mapping[str, str], observe: LineObserver) -> EngineProcess:
    """Start the engine and watch it from the running loop; raises OSError if it cannot be started."""
    process = subprocess.Popen(
        list(command), env=dict(environment), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, process_group=0
    )
    engine = EngineProcess(process)
    asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, engine.reap)
    engine.reap()  # it may have ended before the handler was there
    assert process.stdout is not None
    engine.copy_log(process.stdout, observe)
    return engine


def _copy_log(source: IO[bytes], observe: LineObserver) -> None:
    with source:
        for raw_line in source:
            line = redact(raw_line.decode("latin-1")).encode("latin-1")  # every byte is a character
            with contextlib.suppress(OSError):  # the log has no reader any more; the engine continues
                os.write(1, line)
            observe(line)
