"""Output files that the user names, and standard output.

Problem: an output file may also be an input under another name, the disk may be full, and a failed run must keep the
previous contents.

Idea: files are compared by device and inode. They are opened before the run and truncated when it begins. Errors name
the file.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import stat
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Final, TextIO

from plimsoll.core.errors import PlimsollError

NamedPath = tuple[str, str]  # option and its path

_STDOUT: Final = ("standard output", "/dev/stdout")


class OutputFileError(PlimsollError):
    """A file cannot or must not be written; the message names it."""


def open_for_writing(path: str) -> TextIO:
    """Open a file without truncating it. Raises OutputFileError, also on later writes."""
    try:
        return io.TextIOWrapper(io.BufferedWriter(_NamedFile(path, "a")), encoding="utf-8")
    except OSError as error:
        raise OutputFileError(f"{path}: {error.strerror}") from None


@contextlib.contextmanager
def replacing(path: str) -> Iterator[TextIO]:
    """Open a file that takes the place of the one at `path` once all is written; without an error or not at all.

    A pipe or a device is written itself. Raises OutputFileError, also on later writes.
    """
    place = os.path.realpath(path)
    if os.path.exists(place) and not os.path.isfile(place):
        with open_for_writing(path) as file:
            yield file
        return
    part = f"{place}.{os.getpid()}.part"
    try:
        with open_for_writing(part) as file:
            yield file
        try:
            if os.path.exists(place):
                shutil.copymode(place, part)
            os.replace(part, place)
        except OSError as error:
            raise OutputFileError(f"{path}: {error.strerror}") from None
    finally:
        with contextlib.suppress(OSError):
            os.unlink(part)


def truncate(file: TextIO) -> None:
    """Truncate a regular file; do nothing for a pipe or a device."""
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.truncate(0)


def ensure_distinct(reads: Sequence[NamedPath], writes: Sequence[NamedPath]) -> None:
    """Raise OutputFileError if an output file is also an input or another output."""
    option_by_file = {_identity(path): option for option, path in (*reads, _STDOUT)}
    for option, path in writes:
        if path == "-":
            raise OutputFileError(f"{option} -: must be a file, because standard output has the results")
        if os.path.exists(path) and not os.path.isfile(path):  # such as /dev/null
            continue
        if (other := option_by_file.setdefault(_identity(path), option)) != option:
            raise OutputFileError(f"{option} {path}: is also the file of {other}; use another file")


def print_text(text: str) -> None:
    """Write to standard output. Raises OutputFileError, and BrokenPipeError if the reader has closed the pipe."""
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # prevents a second flush at exit
        raise OutputFileError(f"standard output: {error.strerror}") from None


class _NamedFile(io.FileIO):
    """A file whose write errors name the file."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            raise OutputFileError(f"{self.name}: {error.strerror}") from None


def _identity(path: str) -> object:
    """Return device and inode of a file, or its real path if it does not exist."""
    try:
        status = os.stat(path)
    except OSError:
        return os.path.realpath(path)
    return status.st_dev, status.st_ino
