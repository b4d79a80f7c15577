"""The tests' picker, with a record of how long its event loop is blocked: `measured_picker.py SETTINGS-JSON FILE`.

A timer of 1 ms reads the CPU time of the loop's thread. What the thread used between two turns of the timer is an upper
bound on the longest callback between them. Other load of the machine does not add to it. Each quarter of a second, a
line with the monotonic time and the longest block in seconds is appended to the file `blocks` next to the objects.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from pathlib import Path

import uvloop

from tests.gateway import picker_process

BLOCKS = "blocks"
TIMER_S, WINDOW_S = 0.001, 0.25


async def record_blocks(file: Path) -> None:
    """Never returns."""
    last_s = time.thread_time()
    with file.open("a", buffering=1) as lines:
        while True:
            longest_s, end_s = 0.0, time.monotonic() + WINDOW_S
            while time.monotonic() < end_s:
                await asyncio.sleep(TIMER_S)
                now_s = time.thread_time()
                longest_s, last_s = max(longest_s, now_s - last_s), now_s
            lines.write(f"{time.monotonic()} {longest_s}\n")


async def run() -> None:
    objects = Path(sys.argv[2])
    recording = asyncio.create_task(record_blocks(objects.with_name(BLOCKS)))
    await picker_process.run(sys.argv[1], objects)
    recording.cancel()


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    uvloop.run(run())
