"""The source root is called `operator`, like a module of the standard library: it may hold no Python of its own."""

from __future__ import annotations

import operator
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from plimsoll.api.contract import engine_contract
from tests.packaging.imported_modules import imported_modules

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


def test_names_of_tests_have_at_most_60_characters() -> None:
    sources = [path.read_text() for folder in ("tests", "e2e") for path in (ROOT / folder).rglob("test_*.py")]
    names = [name for source in sources for name in re.findall(r"^ *(?:async )?def (test_\w+)", source, re.MULTILINE)]
    assert names
    assert [name for name in names if len(name) > 60] == []


def test_operator_and_engine_image_share_one_contract() -> None:
    bundled = ROOT / "operator" / "plimsoll" / "api" / "contract.json"
    assert bundled.read_bytes() == (ROOT / "engine-image" / "contract.json").read_bytes()
    assert engine_contract().ports["api"] == 8000


@pytest.mark.parametrize(
    "name", ["vllm.py", "redaction.py", "form_data.py", "desired_adapters.py", "prompts.py", "self_benchmark.py"]
)
def test_operator_and_engine_image_share_module(name: str) -> None:
    source = ROOT / "operator" / "plimsoll" / "engines" / name
    assert source.read_bytes() == (ROOT / "engine-image" / "launcher" / name).read_bytes()


def test_checkout_has_no_symbolic_link() -> None:
    tracked = subprocess.run(["git", "ls-files", "-s"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert [line for line in tracked.splitlines() if line.startswith("120000")] == []


@pytest.mark.parametrize("program", OPERATOR_MODULES)
def test_engine_image_program_imports_only_listed_modules(program: str) -> None:
    files = sorted((ROOT / "engine-image" / program).rglob("*.py"))
    assert files
    listed = tuple(f"{module}." for module in OPERATOR_MODULES[program])
    imported = {module for path in files for module in imported_modules(path) if module.split(".")[0] == "plimsoll"}
    assert {module for module in imported if not module.startswith(listed)} == set()
    assert {prefix for prefix in listed if not any(module.startswith(prefix) for module in imported)} == set()


def documented_builds() -> list[tuple[str, Path, Path]]:
    """Every `docker build` line of the pages and of the Dockerfiles, given in the root of the checkout, and every
    image of the release, as (where it stands, Dockerfile, context)."""
    found = []
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "engine-image").glob("*.md"), *DOCKERFILES]
    for page in pages:
        for line in re.findall(r"docker build (?:--build-arg \w+ )*(-f .+)", page.read_text()):
            words = shlex.split(line.split("&&")[0].replace("`", ""))
            found.append((str(page.relative_to(ROOT)), ROOT / words[words.index("-f") + 1], ROOT / words[-1]))
    release = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    for one in release["jobs"]["images"]["strategy"]["matrix"]["include"]:
        found.append(("release.yml", ROOT / one["file"], ROOT / one["context"]))
    return found


BUILDS = documented_builds()


@pytest.mark.parametrize(
    ("where", "dockerfile", "context"), BUILDS, ids=lambda value: str(value).removeprefix(str(ROOT))
)
def test_documented_build_copies_only_files_of_the_checkout(where: str, dockerfile: Path, context: Path) -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    tracked = {ROOT / line for line in listed.splitlines()}
    copies = re.findall(r"^COPY (?!--from)(.+) \S+$", dockerfile.read_text(), re.MULTILINE)
    sources = [context / source for line in copies for source in line.split()]
    assert sources
    missing = [source for source in sources if not any(file.is_relative_to(source) for file in tracked)]
    assert missing == []


@pytest.mark.parametrize("context", sorted({context for _, _, context in BUILDS}), ids=lambda path: path.name)
def test_build_context_has_only_files_of_the_checkout(context: Path) -> None:
    """What setup, tests and builds leave in a checkout is not sent to the builder, nor copied into an image."""
    ignored = (context / ".dockerignore").read_text().splitlines()
    made = [".git", ".venv", "build"] if context == ROOT else []
    assert {"**/__pycache__", *made} <= set(ignored)


def test_every_dockerfile_has_a_documented_build() -> None:
    assert set(DOCKERFILES) == {dockerfile for _, dockerfile, _ in BUILDS}


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_image_makes_copied_code_readable_for_any_user(dockerfile: Path) -> None:
    """A checkout made with umask 077 has files for their owner alone, and COPY keeps that."""
    text = dockerfile.read_text()
    code = re.compile(r"^COPY (?!--from).+ (/app|/opt/plimsoll)\b", re.MULTILINE)
    copied = list(code.finditer(text))
    assert copied
    assert [line[0] for line in copied if f"chmod -R a+rX {line[1]}" not in text[line.end() :]] == []


def test_files_that_the_operator_image_copies_run_alone(tmp_path: Path) -> None:
    """The package without the rest of the checkout, as the image has it."""
    shutil.copytree(ROOT / "operator" / "plimsoll", tmp_path / "plimsoll", ignore=shutil.ignore_patterns("__pycache__"))
    start = "from plimsoll.cli.main import main; raise SystemExit(main(['operator', '--help']))"
    done = subprocess.run(
        [sys.executable, "-c", start],
        cwd=tmp_path,
        env={"PATH": "/usr/bin", "PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "usage: plimsoll operator" in done.stdout
