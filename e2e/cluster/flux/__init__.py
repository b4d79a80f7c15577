"""The sources of Flux's source-controller and kustomize-controller, as they can be built.

Problem: each module names its API by a folder that the published module does not hold. kustomize-controller's
decryption has the client libraries of seven key services built in, and the version of a part that source-controller
names is not published everywhere. Idea: a copy takes the APIs as published, `decryptor.go` for that package, and a
version of the part that is.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from e2e.cluster.settings import CACHE, HERE
from e2e.cluster.shell import output, run

VERSION = "v1.9.6"  # the newest that Go 1.26 builds
KUSTOMIZE = "github.com/fluxcd/kustomize-controller"
SOURCES = "github.com/fluxcd/source-controller"
_ARTIFACT = "github.com/fluxcd/pkg/artifact"
_ARTIFACT_VERSION = "v0.18.0"


def kustomize_controller() -> Path:
    """The folder to build kustomize-controller in."""
    folder = _copy(KUSTOMIZE)
    decryptor = folder / "internal" / "decryptor"
    shutil.rmtree(decryptor)
    decryptor.mkdir()
    shutil.copy2(HERE / "flux" / "decryptor.go", decryptor)
    return folder


def source_controller() -> Path:
    """The folder to build source-controller in."""
    folder = _copy(SOURCES)
    run("go", "mod", "edit", f"-replace={_ARTIFACT}={_ARTIFACT}@{_ARTIFACT_VERSION}", cwd=folder)
    run("go", "mod", "download", _ARTIFACT, cwd=folder)
    return folder


def _copy(module: str) -> Path:
    """A new copy of the module, which is downloaded if it is not there."""
    folder = CACHE / "flux" / module.rpartition("/")[2]
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    run("cp", "-r", "--no-preserve=mode", downloaded(module), folder)  # what Go downloads is read-only
    run("go", "mod", "edit", f"-dropreplace={module}/api", cwd=folder)
    run("go", "mod", "download", f"{module}/api", cwd=folder)  # adds it to the lock file
    return folder


def downloaded(module: str) -> Path:
    """Where Go has unpacked a module of Flux, after a download if need be."""
    return Path(json.loads(output("go", "mod", "download", "-json", f"{module}@{VERSION}", cwd=HERE))["Dir"])
