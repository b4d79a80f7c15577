"""The source of Flux's kustomize-controller without decryption.

Problem: its module names its API by a folder that the published module does not hold, and decryption has the client
libraries of seven key services built in. Idea: a copy takes the API as published, and `decryptor.go` for that package.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from e2e.cluster.settings import CACHE, HERE
from e2e.cluster.shell import output, run

VERSION = "v1.9.6"  # the newest that Go 1.26 builds
MODULE = "github.com/fluxcd/kustomize-controller"
SOURCES = "github.com/fluxcd/source-controller"  # for its definitions: it is not built


def source() -> Path:
    """The folder to build in. The module is downloaded if it is not there, and copied again."""
    folder = CACHE / "flux"
    shutil.rmtree(folder, ignore_errors=True)
    run("cp", "-r", "--no-preserve=mode", downloaded(MODULE), folder)  # what Go downloads is read-only
    decryptor = folder / "internal" / "decryptor"
    shutil.rmtree(decryptor)
    decryptor.mkdir()
    shutil.copy2(HERE / "flux" / "decryptor.go", decryptor)
    run("go", "mod", "edit", f"-dropreplace={MODULE}/api", cwd=folder)
    run("go", "mod", "download", f"{MODULE}/api", cwd=folder)  # adds it to the lock file
    return folder


def downloaded(module: str) -> Path:
    """Where Go has unpacked a module of Flux, after a download if need be."""
    return Path(json.loads(output("go", "mod", "download", "-json", f"{module}@{VERSION}", cwd=HERE))["Dir"])
