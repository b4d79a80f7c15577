"""The source root is called `operator`, like a module of the standard library: it may hold no Python of its own."""

from __future__ import annotations

import ast
import operator
import re
import subprocess
from pathlib import Path

import pytest

from plimsoll.api.contract import engine_contract

ROOT = Path(__file__).parents[2]
# What the programs of the engine images may take from the operator; simulated.Dockerfile copies it.
OPERATOR_MODULES = {
    "launcher": (),
    "simulated": ("plimsoll.engines", "plimsoll.sim.engine", "plimsoll.sim.profiles"),
}
DOCKERFILES = [ROOT / "operator" / "Dockerfile", *sorted((ROOT / "engine-image").glob("*.Dockerfile"))]


def test_source_root_shadows_no_standard_module() -> None:
    assert list((ROOT / "operator").glob("*.py")) == []
    folders = [p.name for p in (ROOT / "operator").iterdir() if p.is_dir() and not p.name.endswith(".egg-info")]
    assert folders == ["plimsoll"]
    assert operator.itemgetter(0)([7]) == 7


def test_operator_and_engine_image_share_one_contract() -> None:
    bundled = ROOT / "operator" / "plimsoll" / "api" / "contract.json"
    assert bundled.read_bytes() == (ROOT / "engine-image" / "contract.json").read_bytes()
    assert engine_contract().ports["api"] == 8000


@pytest.mark.parametrize("name", ["vllm.py", "redaction.py"])
def test_operator_and_engine_image_share_module(name: str) -> None:
    source = ROOT / "operator" / "plimsoll" / "engines" / name
    assert source.read_bytes() == (ROOT / "engine-image" / "launcher" / name).read_bytes()


def test_checkout_has_no_symbolic_link() -> None:
    tracked = subprocess.run(["git", "ls-files", "-s"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert [line for line in tracked.splitlines() if line.startswith("120000")] == []


def _imports(path: Path) -> set[str]:
    """The absolute modules that a file imports, wherever it does."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{name.name}" for name in node.names}
    return found


@pytest.mark.parametrize("program", OPERATOR_MODULES)
def test_engine_image_program_imports_only_listed_modules(program: str) -> None:
    files = sorted((ROOT / "engine-image" / program).rglob("*.py"))
    assert files
    listed = tuple(f"{module}." for module in OPERATOR_MODULES[program])
    imported = {module for path in files for module in _imports(path) if module.split(".")[0] == "plimsoll"}
    assert {module for module in imported if not module.startswith(listed)} == set()
    assert {prefix for prefix in listed if not any(module.startswith(prefix) for module in imported)} == set()


@pytest.mark.parametrize("dockerfile", DOCKERFILES)
def test_dockerfile_copies_only_existing_sources(dockerfile: Path) -> None:
    """The context is the one of the `docker build` line in the file's head or in the docs."""
    context = ROOT if dockerfile.name in ("Dockerfile", "simulated.Dockerfile") else dockerfile.parent
    copies = re.findall(r"^COPY (?!--from)(.+) \S+$", dockerfile.read_text(), re.MULTILINE)
    sources = [source for line in copies for source in line.split()]
    assert sources
    assert [source for source in sources if not (context / source).exists()] == []
