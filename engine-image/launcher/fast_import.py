"""Runs a Python program, such as `vllm serve`, without garbage collection of what its imports make.

Problem: vLLM's imports make a million objects that live until the end of the process. The garbage collector scans them
again and again: during the imports, and in each of the ten full collections that vLLM asks for until it is ready. The
engine core is forked from the API server, so there a scan also copies each page of these objects.
Idea: collect nothing during the imports, then exempt from later collections what they made (`gc.freeze`, as Python's
manual advises before a fork). The program runs with the collector on, as without this module.

    python3 -P -m launcher.fast_import PROGRAM [ARGUMENT...]

A program that another interpreter runs is executed as it is.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import importlib
import os
import runpy
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

# What `vllm serve` imports before it forks its engine core: the API server, and the client of the core.
MODULES = ("vllm.entrypoints.cli.serve", "vllm.v1.engine.async_llm")
MAX_LINE_BYTES = 1024


def interpreter_of(program: Path) -> str:
    """Return the path of the interpreter that the first line of a script names; empty if it names none."""
    with program.open("rb") as file:
        line = file.readline(MAX_LINE_BYTES)
    words = line[2:].decode(errors="replace").split() if line.startswith(b"#!") else []
    if len(words) == 2 and os.path.basename(words[0]) == "env":
        return shutil.which(words[1]) or ""
    return words[0] if len(words) == 1 else ""


def is_this_interpreter(path: str) -> bool:
    """Whether a path names this Python with these packages: two environments may share one program, not its folder."""
    if os.path.dirname(path) != os.path.dirname(sys.executable):
        return False
    return os.path.exists(path) and os.path.samefile(path, sys.executable)


def import_frozen(modules: Iterable[str]) -> None:
    """Import modules and exempt their objects from garbage collection.

    One that cannot be imported is left to the program, which reports it.
    """
    gc.disable()
    try:
        for name in modules:
            with contextlib.suppress(Exception):
                importlib.import_module(name)
        gc.freeze()
    finally:
        gc.enable()


def main(argv: list[str], modules: Iterable[str] = MODULES) -> None:
    """Run the program `argv[0]` in this process. Raises FileNotFoundError, and SystemExit as the program does."""
    program = shutil.which(argv[0])
    if program is None:
        raise FileNotFoundError(errno.ENOENT, "no such program on the PATH", argv[0])
    if not is_this_interpreter(interpreter_of(Path(program))):
        os.execv(program, argv)
    import_frozen(modules)
    sys.argv = [program, *argv[1:]]
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
