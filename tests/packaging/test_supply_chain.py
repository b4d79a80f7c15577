"""What is built comes from files with a known hash: packages by lock file, base images by digest."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
import yaml

from e2e.cluster.settings import BIN
from release import base_images, scan
from tests.packaging.test_layout import DOCKERFILES

ROOT = Path(__file__).parents[2]
LOCKS = scan.locks()
CLUSTER = sorted((ROOT / "e2e" / "cluster").rglob("*Dockerfile"))
# The local cluster's own base: made here of Debian's packages, or pulled by digest and then called this.
LOCAL = {"debian:bookworm-slim": {"e2e/cluster/node/packages.Dockerfile", "e2e/cluster/registry/Dockerfile"}}
RELEASE = (ROOT / ".github" / "workflows" / "release.yml").read_text()
VERSION: str = yaml.safe_load((ROOT / "charts/plimsoll/Chart.yaml").read_text())["version"]


def requirements(lock: Path) -> dict[str, tuple[str, int]]:
    """Version and number of hashes of each requirement, by its normalised name."""
    text = re.sub(r"^ *#.*\n?", "", lock.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    found = {}
    for line in filter(str.strip, text.splitlines()):
        match = re.fullmatch(r"([\w.-]+)==(\S+)((?:\s+--hash=sha256:[0-9a-f]{64})*)\s*", line)
        assert match is not None, line
        name = re.sub(r"[-_.]+", "-", match[1]).lower()
        assert name not in found, name
        found[name] = (match[2], match[3].count("--hash="))
    return found


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.name)
def test_every_requirement_is_pinned_by_hash(lock: Path) -> None:
    assert {name for name, (_, hashes) in requirements(lock).items() if hashes == 0} == set()
    assert requirements(lock)


@pytest.mark.parametrize("name", ["operator.txt", "envoy.txt", "clients.txt"])
def test_lock_files_share_versions(name: str) -> None:
    dev = requirements(ROOT / "requirements" / "dev.txt")
    own = requirements(ROOT / "requirements" / name)
    assert {package: pin for package, pin in own.items() if package in dev and dev[package] != pin} == {}


def test_operator_image_has_each_imported_package() -> None:
    """Tests run with the packages of dev.txt, the image with those of operator.txt."""
    own = requirements(ROOT / "requirements" / "operator.txt")
    distributions = importlib.metadata.packages_distributions()
    code = "\n".join(path.read_text() for path in (ROOT / "operator" / "plimsoll").rglob("*.py"))
    imported = set(re.findall(r"^\s*(?:import|from) (\w+)", code, re.MULTILINE)) & distributions.keys() - {"plimsoll"}
    assert {"aiohttp", "envoy", "yaml"} <= imported
    names = {one: {re.sub(r"[-_.]+", "-", name).lower() for name in distributions[one]} for one in imported}
    assert {one for one in imported if not names[one] & own.keys()} == set()


def test_every_pip_install_requires_hashes() -> None:
    """Of a lock file; the project itself is installed without dependencies and with the setuptools of the lock file."""
    files = [ROOT / "Makefile", ROOT / "requirements" / "lock", ROOT / "engine-image" / "image" / "install_vllm.sh"]
    files += [*DOCKERFILES, *CLUSTER, *(ROOT / ".github" / "workflows").glob("*.yml")]
    found = [
        command
        for file in files
        for command in re.findall(r"pip\S*(?: --python \S+)? install [^&;|\n]+", file.read_text().replace("\\\n", " "))
    ]
    assert len(found) > 6
    unhashed = [command for command in found if "--require-hashes" not in command]
    assert [command.split("'")[0].split()[-2:] for command in unhashed] == [["-e", "."]]
    assert "--no-deps --no-build-isolation" in unhashed[0]


@pytest.mark.parametrize("dockerfile", [*DOCKERFILES, *CLUSTER], ids=lambda path: str(path.relative_to(ROOT)))
def test_dockerfile_names_no_base_but_its_arguments(dockerfile: Path) -> None:
    text = dockerfile.read_text()
    stages = set(re.findall(r"^FROM .+ AS (\S+)$", text, re.MULTILINE))
    bases = set(re.findall(r"^FROM (\S+)", text, re.MULTILINE)) - stages
    path = str(dockerfile.relative_to(ROOT))
    assert [base for base in bases if not re.fullmatch(r"\$\{[A-Z]+\}", base) and path not in LOCAL.get(base, ())] == []
    used = {base[2:-1] for base in bases if base.startswith("$")}
    assert used <= set(re.findall(r"^ARG ([A-Z]+)$", text.split("\nFROM ")[0], re.MULTILINE)), "a default is not pinned"
    assert used <= set(base_images.load()) or dockerfile in CLUSTER


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_documented_builds_pass_the_base_images(dockerfile: Path) -> None:
    path = str(dockerfile.relative_to(ROOT))
    arguments = re.findall(r"^FROM \$\{([A-Z]+)\}", dockerfile.read_text(), re.MULTILINE)
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "engine-image").glob("*.md"), *DOCKERFILES]
    lines = [line for page in pages for line in page.read_text().splitlines() if f" -f {path} " in line]
    assert lines
    expected = "".join(f" --build-arg {name}" for name in dict.fromkeys(arguments))
    assert [line for line in lines if f"docker build{expected} -f" not in line] == []


def test_release_checks_and_passes_every_base_image() -> None:
    jobs = yaml.safe_load(RELEASE)["jobs"]
    assert "make release-check" in jobs["version"]["steps"][-1]["run"]
    assert "python3 -m release.base_images check" in (ROOT / "release" / "check").read_text()
    build = next(step for step in jobs["images"]["steps"] if step.get("id") == "build")
    passed = dict(line.split("=", 1) for line in build["with"]["build-args"].splitlines())
    used = {
        name for path in DOCKERFILES for name in re.findall(r"^FROM \$\{([A-Z]+)\}", path.read_text(), re.MULTILINE)
    }
    assert passed == {name: f"${{{{ steps.bases.outputs.{name} }}}}" for name in used}


def test_release_waits_for_the_scan_and_has_all_sboms() -> None:
    jobs = yaml.safe_load(RELEASE)["jobs"]
    assert "scan" in jobs["images"]["needs"]
    assert "sbom" in jobs["chart"]["needs"]
    built = {entry["image"] for entry in jobs["images"]["strategy"]["matrix"]["include"]}
    assert set(jobs["sbom"]["strategy"]["matrix"]["image"]) == built


def test_chart_has_the_envoy_of_the_base_images() -> None:
    image = yaml.safe_load((ROOT / "charts/plimsoll/values.yaml").read_text())["gateway"]["envoy"]["image"]
    [envoy] = [one for one in base_images.parse(base_images.FILE.read_text()) if one.name == "ENVOY"]
    assert (image["repository"], image["tag"]) == (envoy.repository, envoy.tag)
    assert image["digest"] in ("", envoy.digest)


def test_packaged_chart_has_the_images_of_the_release(tmp_path: Path) -> None:
    for name in ("charts", "release"):
        shutil.copytree(ROOT / name, tmp_path / name)
    digest = "sha256:" + "0" * 64
    (tmp_path / "release" / "base-images.env").write_text(f"ENVOY=x:1@{digest}\n")
    path = os.pathsep.join([str(BIN), os.environ["PATH"]])
    script = ["release/chart", VERSION, "example.com/plimsoll"]
    subprocess.run(script, cwd=tmp_path, env={**os.environ, "PATH": path}, check=True, capture_output=True)
    with tarfile.open(tmp_path / "dist" / f"plimsoll-{VERSION}.tgz") as archive:
        file = archive.extractfile("plimsoll/values.yaml")
        assert file is not None
        packaged = yaml.safe_load(file.read())
    expected = yaml.safe_load((ROOT / "charts/plimsoll/values.yaml").read_text())
    expected["image"]["repository"] = "example.com/plimsoll/operator"
    expected["engine"]["image"] = f"example.com/plimsoll/engine-cuda:{VERSION}"
    expected["gateway"]["envoy"]["image"]["digest"] = digest
    assert packaged == expected


@pytest.mark.parametrize(("version", "line"), [("0.1.0", "Changes"), ("9.9.9", None)])
def test_release_notes_are_the_section_of_the_version(tmp_path: Path, version: str, line: str | None) -> None:
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## [0.1.0]\n\nChanges\n\n## [0.0.9]\n\nOlder\n")
    done = subprocess.run(
        [ROOT / "release" / "notes", version, "notes.md"], cwd=tmp_path, capture_output=True, check=False
    )
    assert (done.returncode == 0) is (line is not None)
    assert (tmp_path / "notes.md").read_text().split() == ([] if line is None else [line])


@pytest.mark.parametrize(
    ("version", "changes", "missing"),
    [("0", VERSION, "pyproject.toml"), (VERSION, "0", "CHANGELOG.md"), (VERSION, VERSION, None)],
)
def test_release_check_names_the_file_without_the_version(
    tmp_path: Path, version: str, changes: str, missing: str | None
) -> None:
    for name in ("charts", "release"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "release" / "base-images.env").write_text("ENVOY=x:1@sha256:" + "0" * 64 + "\n")
    (tmp_path / "CHANGELOG.md").write_text(f"## [{changes}]\n")
    done = subprocess.run(["release/check", version], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == (0 if missing is None else 1), done.stderr
    assert missing is None or done.stdout == f"{missing} does not have version {version}\n"
