"""What a run depends on, as hashes: a kept run is one of this program as long as none of it has changed.

Problem: plays of many versions put together prove nothing about any, and to play all again for a change that has no say
in them takes hours.

Idea: the syntax tree of what runs in a fleet, so that comments have no say; that without the operator's own modules for
runs that it has no part in; and of traces the one that the row reads.
"""

from __future__ import annotations

import ast
import functools
import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

import plimsoll
from bench.scoreboard.play import Task
from bench.scoreboard.rows import Reach
from bench.scoreboard.slices import Slice

_DECIDING: Final = ("core", "api", "sim")
OPERATORS: Final = ("core/autoscaler", "core/calibration", "core/forecast", "core/scaling", "core/signals")
_ASIDE: Final = "core/planning"  # of it nothing runs in a fleet
SHARED: Final = "core/scaling/leaving.py"  # which pod goes, whoever decided that one does
_PLAYING: Final = ("loads.py", "play.py", "slices.py")
_HERE: Final = Path(__file__).parent


class Program(NamedTuple):
    """Of what has a say in a run: in one that the operator has a part in, and in one without it."""

    whole: str
    bare: str


def code() -> Program:
    """The program as it is now."""
    root = Path(plimsoll.__file__).parent
    files = [_HERE / name for name in _PLAYING]
    files += (root / "sim" / "profiles").glob("*.json")
    for name in _DECIDING:
        files += [path for path in (root / name).rglob("*") if path.suffix in (".py", ".json")]
    files = [path for path in files if not path.is_relative_to(root / _ASIDE)]
    operators = {path for name in OPERATORS for path in (root / name).rglob("*")} - {root / SHARED}
    whole, bare = hashlib.sha256(), hashlib.sha256()
    for path in sorted(files):
        read = path.read_bytes()
        said = _executed(read) if path.suffix == ".py" else read
        whole.update(said)
        if path not in operators:
            bare.update(said)
    return Program(whole.hexdigest()[:12], bare.hexdigest()[:12])


def key_of(task: Task, program: Program) -> str:
    """Hash of all that the run depends on."""
    row = replace(task.row, name="", says="", reach=Reach(), seeds=0)
    ran = program.whole if task.operated else program.bare
    read = _trace(row.load.path) if isinstance(row.load, Slice) else ""
    return hashlib.sha256(repr((row, task.plant, task.policy, task.seed, ran, read)).encode()).hexdigest()[:24]


@functools.cache
def _trace(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _executed(source: bytes) -> bytes:
    """The syntax tree, without the strings that stand as statements."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [one for one in body if not _is_word(one)]  # type: ignore[attr-defined]
    return ast.dump(tree).encode()


def _is_word(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
