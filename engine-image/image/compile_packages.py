"""Compiles the Python packages of an image whose installer did not.

Problem: engines run as a user that may not write, so without compiled files each of an engine's processes compiles
torch, transformers and vLLM again at every start. Idea: compile once, in the image, what has no compiled form yet.
"""

import compileall
import importlib.util
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path


def missing() -> list[Path]:
    """Modules below the folders of packages that have no compiled file."""
    folders = {Path(entry) for entry in sys.path if entry.endswith("-packages")}
    modules = (module for folder in folders for module in folder.rglob("*.py"))
    return [module for module in modules if not Path(importlib.util.cache_from_source(str(module))).exists()]


def compile_module(module: Path) -> bool:
    """Whether it is Python: packages have templates with the same ending."""
    return compileall.compile_file(module, quiet=2)


if __name__ == "__main__":
    modules = missing()
    with ProcessPoolExecutor() as pool:
        compiled = sum(pool.map(compile_module, modules, chunksize=64))
    print(f"compiled {compiled} of {len(modules)} modules")
