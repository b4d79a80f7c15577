"""Images without a container engine: what a Dockerfile's lines leave, and documents that name each other by digest."""

from __future__ import annotations

import hashlib
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from e2e.gpu import oci

ROOT = Path(__file__).resolve().parents[2]


def test_an_image_names_its_parts_by_digest(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "pause").write_text("program")
    target = tmp_path / "image.tar"
    oci.write_image(root, {"Entrypoint": ["/pause"], "User": "1000:1000", "Image": "ignored"}, "localhost/a:b", target)
    with tarfile.open(target) as tar:
        index = json.load(_file(tar, "index.json"))
        (named,) = index["manifests"]
        assert named["annotations"]["io.containerd.image.name"] == "localhost/a:b"
        manifest = json.loads(_blob(tar, named["digest"]))
        config = json.loads(_blob(tar, manifest["config"]["digest"]))
        (layer,) = manifest["layers"]
        assert config["rootfs"]["diff_ids"] == [layer["digest"]]
        assert config["config"] == {"Entrypoint": ["/pause"], "User": "1000:1000"}
        assert len(_blob(tar, layer["digest"])) == layer["size"]


def _file(tar: tarfile.TarFile, name: str) -> Any:
    file = tar.extractfile(name)
    assert file is not None
    return file


def _blob(tar: tarfile.TarFile, digest: str) -> bytes:
    raw: bytes = _file(tar, f"blobs/sha256/{digest.removeprefix('sha256:')}").read()
    assert f"sha256:{hashlib.sha256(raw).hexdigest()}" == digest
    return raw


def test_lines_after_from_become_configuration_and_files(tmp_path: Path) -> None:
    dockerfile, context, root = tmp_path / "Dockerfile", tmp_path / "context", tmp_path / "root"
    (context / "part/__pycache__").mkdir(parents=True)
    (context / "part/a.py").write_text("a")
    (context / "one.json").write_text("{}")
    root.mkdir()
    dockerfile.write_text(
        "ARG BASE=x\nFROM y AS build\nRUN false\nFROM ${BASE}\n# a comment\nENV HOME=/home A='b c'\n"
        'USER 1000:1000\nWORKDIR /home\nEXPOSE 8000 8001\nENTRYPOINT ["sh", "x"]\nCMD []\n'
        "COPY one.json /opt/\nCOPY part \\\n  /opt/part\n"
    )
    config: dict[str, Any] = {"Env": ["PATH=/bin", "HOME=/root"], "Cmd": ["old"]}
    lines = oci.apply_dockerfile(dockerfile, context, root, config)
    assert len(lines) == 8
    assert config == {
        "Env": ["PATH=/bin", "HOME=/home", "A=b c"],
        "User": "1000:1000",
        "WorkingDir": "/home",
        "ExposedPorts": {"8000/tcp": {}, "8001/tcp": {}},
        "Entrypoint": ["sh", "x"],
        "Cmd": [],
    }
    assert (root / "opt/one.json").read_text() == "{}"
    assert [path.name for path in (root / "opt/part").iterdir()] == ["a.py"]


def test_a_stage_has_the_lines_of_the_one_that_it_is_built_on(tmp_path: Path) -> None:
    dockerfile = tmp_path / "Dockerfile"
    dockerfile.write_text(
        "FROM x AS other\nENV A=0\nFROM y AS base\nENV B=1\nFROM base AS middle\nENV C=2\nFROM middle\nENV D=3\n"
    )
    config: dict[str, Any] = {}
    oci.apply_dockerfile(dockerfile, tmp_path, tmp_path, config)
    assert config == {"Env": ["B=1", "C=2", "D=3"]}


def test_an_unknown_line_is_refused(tmp_path: Path) -> None:
    dockerfile = tmp_path / "Dockerfile"
    dockerfile.write_text("FROM a\nVOLUME /x\n")
    with pytest.raises(oci.DockerfileError, match="VOLUME is not known here"):
        oci.apply_dockerfile(dockerfile, tmp_path, tmp_path, {})


def test_each_line_of_the_engines_dockerfile_is_known() -> None:
    lines = oci._last_stages(oci._logical_lines((ROOT / "engine-image/cuda.Dockerfile").read_text()))
    words = {line.split()[0] for line in lines}
    assert words <= {"RUN", "ENV", "WORKDIR", "USER", "EXPOSE", "ENTRYPOINT", "CMD", "COPY"}
