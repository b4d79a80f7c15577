"""Hashes of a run's inputs: a stored run is valid for this program as long as none of them has changed.

Problem: runs of many versions put together prove nothing about any of them, and repeating all runs for a change without
effect on them takes hours.

Idea: the syntax tree of the code that runs in a fleet, so comments do not count; without the operator's own modules for
runs that do not use them; and of traces the one that the row reads.
"""

from __future__ import annotations

import ast
import functools
import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

import plimsoll
from bench.scoreboard.rows import RowTargets
from bench.scoreboard.simulate_run import RunTask
from bench.scoreboard.trace_slices import TraceSlice

_HASHED_PACKAGES: Final = ("core", "api", "sim")
OPERATOR_PACKAGES: Final = ("core/autoscaling", "core/demand", "core/engine_model/calibration")
_EXCLUDED_PACKAGE: Final = "core/planning"  # of it nothing runs in a fleet
SHARED_MODULE: Final = "core/autoscaling/scale_down_candidates.py"  # which pod goes, whoever decided that one does
_HASHED_MODULES: Final = ("listed_starts.py", "loads.py", "simulate_run.py", "trace_slices.py")
_FOLDER: Final = Path(__file__).parent


class CodeHash(NamedTuple):
    """Of what has a say in a run: in one that the operator has a part in, and in one without it."""

    with_operator: str
    without_operator: str


def code_hash() -> CodeHash:
    """The program as it is now."""
    root = Path(plimsoll.__file__).parent
    files = [_FOLDER / name for name in _HASHED_MODULES]
    files += (root / "sim" / "profiles").glob("*.json")
    for name in _HASHED_PACKAGES:
        files += [path for path in (root / name).rglob("*") if path.suffix in (".py", ".json")]
    files = [path for path in files if not path.is_relative_to(root / _EXCLUDED_PACKAGE)]
    operators = {path for name in OPERATOR_PACKAGES for path in (root / name).rglob("*")} - {root / SHARED_MODULE}
    with_operator, without_operator = hashlib.sha256(), hashlib.sha256()
    for path in sorted(files):
        content = path.read_bytes()
        hashed = executed_code(content) if path.suffix == ".py" else content
        with_operator.update(hashed)
        if path not in operators:
            without_operator.update(hashed)
    return CodeHash(with_operator.hexdigest()[:12], without_operator.hexdigest()[:12])


def run_key(task: RunTask, program: CodeHash) -> str:
    """Hash of all that the run depends on."""
    row = replace(task.row, name="", description="", targets=RowTargets(), seeds=0)
    code = program.with_operator if task.uses_operator else program.without_operator
    trace = _trace_hash(row.load.path) if isinstance(row.load, TraceSlice) else ""
    return hashlib.sha256(repr((row, task.plant, task.policy, task.seed, code, trace)).encode()).hexdigest()[:24]


@functools.cache
def _trace_hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def executed_code(source: bytes) -> bytes:
    """The syntax tree of a module, without the strings that stand as statements."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [one for one in body if not _is_docstring(one)]  # type: ignore[attr-defined]
    return ast.dump(tree).encode()


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
