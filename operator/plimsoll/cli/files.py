"""What a program writes: files that a person names, and standard output.

Problem: such a file may be one that is read as well, under another name; the disk may be full; and a run that is
refused must leave what lay there.

Idea: files are told apart by what they are. They are opened before the run, so that it is not made in vain, and emptied
when it begins. Whatever cannot be written is said with its name.
"""

from __future__ import annotations

import io
import os
import stat
import sys
from collections.abc import Sequence
from typing import Any, Final, TextIO

from plimsoll.core.errors import PlimsollError

Named = tuple[str, str]  # an option, and the path that was given for it

_STDOUT: Final = ("standard output", "/dev/stdout")


class Unwritable(PlimsollError):
    """A file cannot be written, or must not be; the message names it."""


def opened(path: str) -> TextIO:
    """A file to write to, with what it holds until it is emptied. Raises Unwritable, when it is written to as well."""
    try:
        return io.TextIOWrapper(io.BufferedWriter(_File(path, "a")), encoding="utf-8")
    except OSError as error:
        raise Unwritable(f"{path}: {error.strerror}") from None


def empty(file: TextIO) -> None:
    """Drops what a file holds; a pipe or a device holds nothing."""
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.truncate(0)


def apart(reads: Sequence[Named], writes: Sequence[Named]) -> None:
    """Refuses to write where something is read, or something else is written. Raises Unwritable."""
    taken = {_identity(path): option for option, path in (*reads, _STDOUT)}
    for option, path in writes:
        if path == "-":
            raise Unwritable(f"{option} -: must be a file, since standard output has the figures")
        if os.path.exists(path) and not os.path.isfile(path):  # such as /dev/null
            continue
        if (other := taken.setdefault(_identity(path), option)) != option:
            raise Unwritable(f"{option} {path}: is the file of {other} too, and needs to be one of its own")


def say(text: str) -> None:
    """Writes to standard output. Raises Unwritable, and BrokenPipeError where nobody reads on."""
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python must not flush at its end again
        raise Unwritable(f"standard output: {error.strerror}") from None


class _File(io.FileIO):
    """A file whose faults are told with its name, whoever writes to it."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            raise Unwritable(f"{self.name}: {error.strerror}") from None


def _identity(path: str) -> object:
    """What all names of a file have in common; of one that is not there, its full path."""
    try:
        found = os.stat(path)
    except OSError:
        return os.path.realpath(path)
    return found.st_dev, found.st_ino
