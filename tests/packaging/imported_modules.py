"""The modules that a file imports, wherever in the file it does."""

from __future__ import annotations

import ast
from pathlib import Path


def imported_modules(path: Path, package: str = "") -> set[str]:
    """Absolute names, with what is taken from each: `from a import b` gives `a.b`. package: that of the file, for its
    relative imports; without it these are left out.
    """
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and (package or not node.level):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*parents, *([node.module] if node.module else [])])
            found |= {f"{module}.{name.name}" for name in node.names}
    return found
