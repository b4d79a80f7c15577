"""Lines to a pipe that is read, that is full, and whose reader is gone."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from plimsoll.gateway import line_writer
from plimsoll.gateway.line_writer import LineWriter

pytestmark = pytest.mark.asyncio
LINE = b"x" * 1023 + b"\n"


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        try:
            os.close(end)
        except OSError:  # the test closed it
            continue


def read_lines(fd: int, count: int) -> bytes:
    data = b""
    while data.count(b"\n") < count:
        data += os.read(fd, 1 << 16)
    return data


async def test_lines_arrive_in_order(pipe: tuple[int, int]) -> None:
    writer = LineWriter(pipe[1])
    for number in range(3):
        writer.write(b"%d\n" % number)
    writer.close()
    assert read_lines(pipe[0], 3) == b"0\n1\n2\n"
    assert writer.take_dropped() == 0


async def test_full_pipe_drops_and_counts_and_never_blocks(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_writer, "CLOSE_SECONDS", 60.0)
    writer, sent = LineWriter(pipe[1]), 3000
    for _ in range(sent):  # 3 MB for a pipe that holds 64 KiB and is not read
        writer.write(LINE)
        writer.flush()
    dropped = writer.take_dropped()
    expected = sent - dropped
    assert line_writer.MAX_PENDING_BYTES <= expected * len(LINE) <= line_writer.MAX_PENDING_BYTES + (1 << 17)
    assert writer.take_dropped() == 0
    found: list[bytes] = []
    reader = threading.Thread(target=lambda: found.append(read_lines(pipe[0], expected)))
    reader.start()
    writer.close()
    reader.join()
    assert found == [LINE * expected]  # whole lines only


async def test_non_blocking_pipe_loses_nothing(pipe: tuple[int, int]) -> None:
    os.set_blocking(pipe[1], False)
    writer = LineWriter(pipe[1])
    for _ in range(200):
        writer.write(LINE)
    writer.flush()
    assert read_lines(pipe[0], 200) == LINE * 200
    writer.close()
    assert writer.take_dropped() == 0


async def test_lost_reader_is_counted_and_ends_nothing(pipe: tuple[int, int]) -> None:
    os.close(pipe[0])
    writer = LineWriter(pipe[1])
    writer.write(LINE)
    writer.flush()
    writer.write(LINE)
    writer.close()
    assert writer.take_dropped() == 2
