"""Container images from folders, without a container engine: an OCI layout in one tar, as `ctr images import` reads it.

Problem: the machine with the GPUs has no Docker and no registry, and the engine's base is that machine itself.
Idea: an image is a tar of files, a configuration and three documents that name them by digest. The lines of a
Dockerfile that come after its base are carried out on a folder by hand; they are few.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import os
import shlex
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

_LAYER: Final = "application/vnd.oci.image.layer.v1.tar"
_CONFIG: Final = "application/vnd.oci.image.config.v1+json"
_MANIFEST: Final = "application/vnd.oci.image.manifest.v1+json"
_INDEX: Final = "application/vnd.oci.image.index.v1+json"
_BLOCK: Final = 1 << 20
_FROM_IMAGE: Final = ("Env", "Entrypoint", "Cmd", "User", "WorkingDir", "ExposedPorts")


class DockerfileError(Exception):
    """A line that this cannot carry out."""


def write_image(root: Path, config: Mapping[str, Any], reference: str, target: Path) -> None:
    """An image of one layer, all files of `root` with their owners. `config`: Docker's `Config` of the image."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        layer = Path(folder) / "layer.tar"
        subprocess.run(["tar", "--numeric-owner", "-C", str(root), "-cf", str(layer), "."], check=True)
        layer_digest = _digest(layer)
        document = {
            "architecture": "amd64",
            "os": "linux",
            "config": {key: config[key] for key in _FROM_IMAGE if config.get(key)},
            "rootfs": {"type": "layers", "diff_ids": [layer_digest]},
        }
        raw_config = json.dumps(document).encode()
        manifest = {
            "schemaVersion": 2,
            "mediaType": _MANIFEST,
            "config": _descriptor(_CONFIG, raw_config),
            "layers": [{"mediaType": _LAYER, "digest": layer_digest, "size": layer.stat().st_size}],
        }
        raw_manifest = json.dumps(manifest).encode()
        named = _descriptor(_MANIFEST, raw_manifest) | {
            "platform": {"architecture": "amd64", "os": "linux"},
            "annotations": {"io.containerd.image.name": reference, "org.opencontainers.image.ref.name": reference},
        }
        index = json.dumps({"schemaVersion": 2, "mediaType": _INDEX, "manifests": [named]}).encode()
        with tarfile.open(target, "w") as tar:
            _add(tar, "oci-layout", b'{"imageLayoutVersion": "1.0.0"}')
            _add(tar, "index.json", index)
            for raw in (raw_config, raw_manifest):
                _add(tar, f"blobs/sha256/{hashlib.sha256(raw).hexdigest()}", raw)
            tar.add(layer, f"blobs/sha256/{layer_digest.removeprefix('sha256:')}")


def apply_dockerfile(dockerfile: Path, context: Path, root: Path, config: dict[str, Any]) -> list[str]:
    """Carry out on `root` the lines of the last stage and of those that it is built on, and set `config`; the lines.

    The first of these stages begins with a base image, which `root` stands for. Raises DockerfileError.
    """
    lines = _last_stages(_logical_lines(dockerfile.read_text()))
    for line in lines:
        word, _, rest = line.partition(" ")
        _apply(word.upper(), rest.strip(), context, root, config)
    return lines


def _last_stages(lines: Sequence[str]) -> list[str]:
    """The lines of the last stage, after those of the stage whose name it begins with, and so on."""
    begins = [number for number, line in enumerate(lines) if line.split()[0].upper() == "FROM"]
    stages: dict[str, list[str]] = {}
    own: list[str] = []
    for begin, end in itertools.pairwise((*begins, len(lines))):
        words = lines[begin].split()
        own = [*stages.get(words[1], ()), *lines[begin + 1 : end]]
        stages[words[3] if len(words) > 3 else ""] = own
    return own


def _logical_lines(text: str) -> list[str]:
    lines, pending = [], ""
    for raw in text.splitlines():
        line = raw.strip()
        if line.startswith("#") or not (line or pending):
            continue
        pending += line.removesuffix("\\")
        if not line.endswith("\\"):
            lines.append(pending)
            pending = ""
    return lines


def _apply(word: str, rest: str, context: Path, root: Path, config: dict[str, Any]) -> None:
    match word:
        case "RUN":
            variables = dict(entry.split("=", 1) for entry in config.get("Env", []))
            subprocess.run(["chroot", str(root), "/bin/sh", "-c", rest], check=True, env={**os.environ, **variables})
        case "ENV":
            assigned = dict(pair.split("=", 1) for pair in shlex.split(rest))
            kept = [entry for entry in config.get("Env", []) if entry.split("=", 1)[0] not in assigned]
            config["Env"] = [*kept, *(f"{name}={value}" for name, value in assigned.items())]
        case "WORKDIR":
            config["WorkingDir"] = rest
        case "USER":
            config["User"] = rest
        case "EXPOSE":
            config["ExposedPorts"] = {f"{port}/tcp": {} for port in rest.split()}
        case "ENTRYPOINT":
            config["Entrypoint"], config["Cmd"] = json.loads(rest), []
        case "CMD":
            config["Cmd"] = json.loads(rest)
        case "COPY":
            *sources, target = rest.split()
            for source in sources:
                _copy(context / source, target, root)
        case _:
            raise DockerfileError(f"{word} is not known here: {rest}")


def _copy(source: Path, target: str, root: Path) -> None:
    """As COPY does: a folder's content into the target, a file under its name where the target ends with a slash."""
    place = root / target.lstrip("/")
    if source.is_dir():
        shutil.copytree(source, place, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    else:
        place = place / source.name if target.endswith("/") else place
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, place)
    for path in (place, *(place.rglob("*") if place.is_dir() else ())):
        path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)


def read_config(path: Path) -> dict[str, Any]:
    """Docker's `Config` of an image, as `docker image inspect` shows it."""
    return dict(json.loads(path.read_text()))


def _descriptor(media_type: str, raw: bytes) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": f"sha256:{hashlib.sha256(raw).hexdigest()}", "size": len(raw)}


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return f"sha256:{digest.hexdigest()}"


def _add(tar: tarfile.TarFile, name: str, raw: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(raw)
    tar.addfile(entry, io.BytesIO(raw))
