"""Bills of materials of small images: tar archives, and a `docker` that exports one."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from release.sbom import SbomError, document, of_image

STATUS = """Package: libc6
Status: install ok installed
Architecture: amd64
Version: 2.36-9+deb12u13
Description: library
 a line
 .

Package: removed
Status: deinstall ok config-files
Architecture: amd64
Version: 1

Package: adduser
Status: install ok installed
Architecture: all
Version: 1:3.134~rc1
"""
FILES = {
    "var/lib/dpkg/status": STATUS,
    "usr/lib/os-release": 'NAME="Debian"\nID=debian\nVERSION_ID="12"\n',
    "opt/x/site-packages/Foo_Bar-1.0.dist-info/METADATA": (
        "Metadata-Version: 2.4\nName: Foo_Bar\nVersion: 1.0+cpu\nLicense-Expression: MIT\n\nName: not this\n"
    ),
    "opt/y/site-packages/foo_bar-1.0.dist-info/METADATA": "Name: foo.bar\nVersion: 1.0+cpu\nLicense-Expression: MIT\n",
    "opt/x/site-packages/broken-1.dist-info/METADATA": "Name: broken\n",
    "etc/passwd": "root\n",
}


def archive(files: dict[str, str], prefix: str = "") -> io.BytesIO:
    """As `docker export` gives it: folders, and links that lead nowhere."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        link = tarfile.TarInfo("etc/os-release")
        link.type, link.linkname = tarfile.SYMTYPE, "../usr/lib/os-release"
        tar.addfile(link)
        for name, text in files.items():
            info = tarfile.TarInfo(prefix + name)
            info.size = len(text.encode())
            tar.addfile(info, io.BytesIO(text.encode()))
    out.seek(0)
    return out


def components(made: dict[str, Any]) -> list[tuple[str, str]]:
    return [(part["purl"], part["version"]) for part in made["components"]]


@pytest.mark.parametrize("prefix", ["", "./"])
def test_document_lists_debian_and_python_packages_once(prefix: str) -> None:
    made = document("operator", "registry/operator:1", archive(FILES, prefix))
    assert components(made) == [
        ("pkg:deb/debian/adduser@1%3A3.134~rc1?arch=all&distro=debian-12", "1:3.134~rc1"),
        ("pkg:deb/debian/libc6@2.36-9%2Bdeb12u13?arch=amd64&distro=debian-12", "2.36-9+deb12u13"),
        ("pkg:pypi/foo-bar@1.0%2Bcpu", "1.0+cpu"),
    ]
    assert made["components"][2]["licenses"] == [{"expression": "MIT"}]
    assert made["metadata"]["component"]["version"] == "registry/operator:1"


def test_document_of_same_files_is_the_same() -> None:
    first, second = (document("a", "b", archive(files)) for files in (FILES, dict(reversed(FILES.items()))))
    assert first["serialNumber"] == second["serialNumber"]
    assert document("a", "c", archive(FILES))["serialNumber"] != first["serialNumber"]


def test_document_names_the_distribution_of_the_base() -> None:
    made = document("a", "b", archive(FILES | {"usr/lib/os-release": 'ID=ubuntu\nVERSION_ID="22.04"\n'}))
    assert components(made)[0][0].startswith("pkg:deb/ubuntu/adduser@")
    assert components(made)[0][0].endswith("&distro=ubuntu-22.04")


def test_document_without_packages_is_an_error() -> None:
    with pytest.raises(SbomError, match="b has neither Debian packages nor Python distributions"):
        document("a", "b", archive({"etc/passwd": "root\n"}))


def docker(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> Path:
    """A `docker` on the path that writes down how it is called."""
    program = folder / "docker"
    program.write_text(f'#!/bin/sh\necho "$@" >> {folder}/calls\n{script}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder / "calls"


def test_image_is_exported_and_its_container_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "image.tar").write_bytes(archive(FILES).read())
    script = f"case $1 in create) echo c1 ;; export) cat {tmp_path}/image.tar ;; esac"
    calls = docker(tmp_path, monkeypatch, script)
    assert len(of_image("operator", "registry/operator:1")["components"]) == 3
    assert calls.read_text().splitlines() == ["create registry/operator:1 none", "export c1", "rm c1"]


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo 'No such image' >&2; exit 1", "Docker has no image x: No such image"),
        ("[ $1 = create ] && echo c1 || exit 1", "x: docker export gave no archive"),
    ],
)
def test_image_that_docker_cannot_export_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, message: str
) -> None:
    docker(tmp_path, monkeypatch, script)
    with pytest.raises(SbomError, match=message):
        of_image("operator", "x")


def test_document_is_plain_json() -> None:
    made = document("a", "b", archive(FILES))
    assert json.loads(json.dumps(made)) == made
    assert (made["bomFormat"], made["specVersion"]) == ("CycloneDX", "1.6")
