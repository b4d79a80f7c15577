"""What packages with a promise may import: a list of what is allowed, so that nothing new is allowed by omission.

Which layer may import which is in `[tool.importlinter]` of `pyproject.toml`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from tests.packaging.imported_modules import imported_modules

SOURCE: Final = Path(__file__).parents[2] / "operator"

# Of the standard library, what reads no clock, no network, no file and no random source, and writes no log.
PURE: Final = frozenset({
    "__future__", "bisect", "collections", "contextlib", "dataclasses", "decimal", "enum", "functools", "hashlib",
    "heapq", "inspect", "itertools", "math", "operator", "re", "reprlib", "statistics", "string", "struct", "sys",
    "types", "typing", "zlib",
})  # fmt: skip
PURE_ENGINES: Final = "plimsoll.engines.vllm"  # flags and their syntax


class Rule(NamedTuple):
    """external: top-level modules outside `plimsoll`. own: modules of `plimsoll`, each with what is below it."""

    packages: tuple[str, ...]
    external: frozenset[str]
    own: tuple[str, ...]
    without: tuple[str, ...] = ()


RULES: Final = {
    "core is pure, and needs numpy": Rule(
        ("plimsoll.core",), PURE | {"numpy"}, ("plimsoll.core",), without=("plimsoll.core.planning",)
    ),
    "core.planning also knows vLLM's flags": Rule(
        ("plimsoll.core.planning",), PURE | {"numpy"}, ("plimsoll.core", PURE_ENGINES)
    ),
    "what core.planning knows of engines is as pure": Rule((PURE_ENGINES,), PURE | {"json"}, ()),
    "engines need the standard library: the engine image has a copy": Rule(
        ("plimsoll.engines",), sys.stdlib_module_names, ("plimsoll.engines",)
    ),
    "the simulated engine needs itself and the profiles: the engine image has a copy": Rule(
        ("plimsoll.sim.engine", "plimsoll.sim.profiles"),
        sys.stdlib_module_names,
        ("plimsoll.sim.engine", "plimsoll.sim.profiles"),
    ),
}


def _is_below(module: str, parents: tuple[str, ...]) -> bool:
    return any(module == parent or module.startswith(f"{parent}.") for parent in parents)


def _violations(source: Path, rule: Rule) -> list[str]:
    """Imports that a rule does not allow, as `file: module`. Raises AssertionError if a package has no file."""
    found = []
    for package in rule.packages:
        path = source / package.replace(".", "/")
        files = sorted({*path.rglob("*.py"), *([path.with_suffix(".py")] if path.with_suffix(".py").exists() else [])})
        assert files, package
        for file in files:
            parent = ".".join(file.relative_to(source).parent.parts)
            if _is_below(f"{parent}.{file.stem}", rule.without):
                continue
            for module in sorted(imported_modules(file, parent)):
                if module.split(".")[0] not in rule.external and not _is_below(module, rule.own):
                    found.append(f"{file.relative_to(source)}: {module}")
    return found


@pytest.mark.parametrize("name", RULES)
def test_package_imports_only_what_is_allowed(name: str) -> None:
    assert _violations(SOURCE, RULES[name]) == []


@pytest.mark.parametrize(
    ("name", "module", "line"),
    [
        ("core is pure, and needs numpy", "plimsoll/core/x.py", "import aiohttp"),
        ("core is pure, and needs numpy", "plimsoll/core/demand/x.py", "from xxhash import xxh64"),
        ("core is pure, and needs numpy", "plimsoll/core/demand/x.py", "from time import monotonic"),
        ("core is pure, and needs numpy", "plimsoll/core/admission/x.py", "from plimsoll.engines import vllm"),
        ("core is pure, and needs numpy", "plimsoll/core/demand/x.py", "from ...telemetry import tracing"),
        ("core.planning also knows vLLM's flags", "plimsoll/core/planning/x.py", "from plimsoll.engines import sglang"),
        ("what core.planning knows of engines is as pure", "plimsoll/engines/vllm.py", "import os"),
        ("engines need the standard library: the engine image has a copy", "plimsoll/engines/x.py", "import grpc"),
        (
            "the simulated engine needs itself and the profiles: the engine image has a copy",
            "plimsoll/sim/engine/x.py",
            "def late():\n    from plimsoll.core import stats",
        ),
    ],
)
def test_import_beyond_rule_is_found(name: str, module: str, line: str, tmp_path: Path) -> None:
    for package in RULES[name].packages:
        (tmp_path / package.replace(".", "/")).mkdir(parents=True)
        (tmp_path / package.replace(".", "/") / "__init__.py").write_text("import math\n")
    (tmp_path / module).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / module).write_text(line)
    assert [violation.partition(":")[0] for violation in _violations(tmp_path, RULES[name])] == [module]
