"""Where clients that nobody here wrote come from."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path

import pytest

from e2e.cluster.settings import CACHE

NODE_PACKAGE = "openai@7.55.0"


def require_package(package: str) -> None:
    """Skip where a Python package is missing."""
    if not importlib.util.find_spec(package):
        pytest.skip(f"{package} is not installed (make test and make e2e install it)")


def node_folder() -> Path:
    """A folder with the openai SDK for Node, installed once into the cache; scripts that use it must lie there."""
    if not shutil.which("npm"):
        pytest.skip("npm is not installed")
    folder = CACHE.parent / "clients-node"
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "node_modules" / "openai").exists():
        argv = ["npm", "install", "--no-audit", "--no-fund", "--silent", "--prefix", str(folder), NODE_PACKAGE]
        subprocess.run(argv, check=True)
    return folder
