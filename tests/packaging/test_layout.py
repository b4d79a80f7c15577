"""The source root is called `operator`, like a module of the standard library: it may hold no Python of its own."""

from __future__ import annotations

import operator
import re
import subprocess
from pathlib import Path

import pytest

from plimsoll.api.contract import engine_contract

ROOT = Path(__file__).parents[2]
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


@pytest.mark.parametrize("dockerfile", DOCKERFILES)
def test_dockerfile_copies_only_existing_sources(dockerfile: Path) -> None:
    """The context is the one of the `docker build` line in the file's head or in the docs."""
    context = ROOT if dockerfile.name in ("Dockerfile", "simulated.Dockerfile") else dockerfile.parent
    copies = re.findall(r"^COPY (?!--from)(.+) \S+$", dockerfile.read_text(), re.MULTILINE)
    sources = [source for line in copies for source in line.split()]
    assert sources
    assert [source for source in sources if not (context / source).exists()] == []
