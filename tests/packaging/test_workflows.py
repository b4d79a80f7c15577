"""The workflows, the pre-commit hooks and CONTRIBUTING.md name verbs, files and folders that exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.cluster.planning import VERSIONS
from e2e.cluster.settings import KUBERNETES_VARIABLE

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
HOOKS = ROOT / ".pre-commit-config.yaml"
GUIDES = [ROOT / name for name in ("CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md", "CHANGELOG.md")]
GUIDES += [ROOT / "changelog.d" / "README.md"]
PAGES = [*GUIDES, *(ROOT / "docs" / "reference" / f"{name}.md" for name in ("versioning", "support-matrix"))]
IGNORED = (".venv/", "build/", "~/", "/")  # made by a build, or outside the checkout
VERBS = set(re.findall(r"^([a-z0-9-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def steps() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every step of every job, with the names of its workflow and job."""
    for workflow in WORKFLOWS:
        for name, job in load(workflow)["jobs"].items():
            yield from ((f"{workflow.name}:{name}", step) for step in job.get("steps", ()))


def make_verbs(text: str) -> set[str]:
    calls = re.findall(r"\bmake((?: [a-z0-9-]+)+)", text)
    return {verb for call in calls for verb in call.split()}


def named_paths(text: str) -> set[str]:
    """Words in backticks with a slash; NAME in one stands for any name."""
    words = re.findall(r"`([\w.*~-]*/[\w./*-]*)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    return {word.replace("NAME", "*") for word in words if not word.startswith(IGNORED)}


def test_workflow_steps_call_existing_make_verbs() -> None:
    called = {verb for _, step in steps() for verb in make_verbs(step.get("run", ""))}
    assert {"check", "verify", "test", "e2e"} <= called
    assert called <= VERBS


def test_workflow_local_calls_name_existing_files() -> None:
    jobs = [job for workflow in WORKFLOWS for job in load(workflow)["jobs"].values()]
    local = [job["uses"] for job in jobs if job.get("uses", "").startswith("./")]
    assert local
    assert [path for path in local if not (ROOT / path).is_file()] == []


def test_workflow_actions_are_pinned_by_major_version() -> None:
    used = [step["uses"] for _, step in steps() if "uses" in step]
    assert used
    assert [action for action in used if not re.fullmatch(r"[\w.-]+/[\w./-]+@v\d+", action)] == []


def test_release_builds_each_dockerfile_in_its_context() -> None:
    """The context is the one of the `docker build` line in the documentation."""
    images = load(ROOT / ".github" / "workflows" / "release.yml")["jobs"]["images"]["strategy"]["matrix"]["include"]
    built = {entry["file"]: entry["context"] for entry in images}
    dockerfiles = [ROOT / "operator" / "Dockerfile", *(ROOT / "engine-image").glob("*.Dockerfile")]
    assert set(built) == {str(path.relative_to(ROOT)) for path in dockerfiles}
    for file, context in built.items():
        at_root = Path(file).name in ("Dockerfile", "simulated.Dockerfile")
        assert context == ("." if at_root else "engine-image"), file


def test_ci_python_versions_start_at_required_version() -> None:
    versions = load(ROOT / ".github" / "workflows" / "ci.yml")["jobs"]["test"]["strategy"]["matrix"]["python"]
    required = re.search(r'requires-python = ">=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert required is not None
    assert versions[0] == required[1]
    assert all(isinstance(version, str) for version in versions), "3.10 without quotes is 3.1"


def test_extended_tests_run_each_week_and_before_a_release() -> None:
    called = {where for where, step in steps() if "test-all" in make_verbs(step.get("run", ""))}
    assert called == {"extended.yml:test-all"}
    extended = load(ROOT / ".github" / "workflows" / "extended.yml")
    assert {"schedule", "workflow_call"} <= set(extended[True]), "YAML reads `on` as true"
    jobs = load(ROOT / ".github" / "workflows" / "release.yml")["jobs"]
    assert jobs["extended"]["uses"] == "./.github/workflows/extended.yml"
    assert "extended" in jobs["images"]["needs"]


def test_hooks_are_local_and_name_existing_files() -> None:
    repos = load(HOOKS)["repos"]
    assert [repo["repo"] for repo in repos] == ["local"]
    entries = [hook["entry"] for hook in repos[0]["hooks"]]
    words = {word for entry in entries for word in entry.split() if "/" in word and not word.startswith(IGNORED)}
    assert [word for word in sorted(words) if not (ROOT / word).is_file()] == []
    assert {verb for entry in entries for verb in make_verbs(entry)} <= VERBS


@pytest.mark.parametrize("pattern", [hook["files"] for hook in load(HOOKS)["repos"][0]["hooks"] if "files" in hook])
def test_hook_pattern_matches_some_file(pattern: str) -> None:
    roots = [ROOT / name for name in ("operator", "engine-image", "e2e", "crds", "charts", "docs", "release")]
    names = (str(path.relative_to(ROOT)) for root in roots for path in root.rglob("*") if path.is_file())
    assert any(re.search(pattern, name) for name in names)


@pytest.mark.parametrize("form", FORMS, ids=lambda path: path.name)
def test_issue_form_has_unique_ids_and_labels(form: Path) -> None:
    if form.name == "config.yml":
        assert load(form) == {"blank_issues_enabled": False}
        return
    fields = [field for field in load(form)["body"] if field["type"] != "markdown"]
    assert len({field["id"] for field in fields}) == len(fields)
    assert all(field["attributes"]["label"] for field in fields)


@pytest.mark.parametrize("page", GUIDES, ids=lambda path: path.name)
def test_guide_names_only_existing_paths(page: Path) -> None:
    named = named_paths(page.read_text())
    assert [path for path in sorted(named) if not any(ROOT.glob(path.rstrip("/")))] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_page_links_lead_to_existing_files(page: Path) -> None:
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text())]
    local = [link for link in links if link and "://" not in link]
    assert [link for link in local if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_page_make_calls_are_makefile_verbs(page: Path) -> None:
    text = page.read_text()
    code = [*re.findall(r"```bash\n(.*?)```", text, re.DOTALL), *re.findall(r"`(make [a-z0-9 -]+)`", text)]
    lines = [line.partition("#")[0] for block in code for line in block.splitlines()]
    assert {verb for line in lines for verb in make_verbs(line)} <= VERBS


def test_contributing_identifiers_are_in_named_files() -> None:
    """`A` in `path`, `A` or `B` of `path`: the file has these names."""
    name, path = r"`([A-Za-z_]\w*)`", r"`([\w.-]+/[\w./-]+\.(?:py|json))`"
    text = (ROOT / "CONTRIBUTING.md").read_text()
    found = re.findall(rf"{name}(?:\s+(?:or|and)\s+{name})?\s+(?:in|of)\s+{path}", text)
    assert len(found) > 10
    for first, second, file in found:
        assert {word for word in (first, second) if word and word not in (ROOT / file).read_text()} == set(), file


def test_e2e_matrix_has_the_supported_kubernetes_versions() -> None:
    job = load(ROOT / ".github" / "workflows" / "ci.yml")["jobs"]["e2e"]
    assert set(job["strategy"]["matrix"]["kubernetes"]) == set(VERSIONS)
    assert job["env"] == {KUBERNETES_VARIABLE: "${{ matrix.kubernetes }}"}
