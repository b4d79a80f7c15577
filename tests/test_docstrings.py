"""Docstrings describe the code that is there: a rename must not leave the old name in a description.

`name: ...` at the start of a sentence describes a parameter, a field, or a key or field of what is returned. A
name, or `module.name`, in backticks exists in the repository, or in a project named in OTHER_PROJECTS.
"""

from __future__ import annotations

import ast
import builtins
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("operator/plimsoll", "engine-image", "bench")
COPIED = {"vllm.py", "redaction.py", "form_data.py", "desired_adapters.py", "prompts.py", "self_benchmark.py"}

# Names in backticks that other projects own.
OTHER_PROJECTS = {
    "ActivePodsWithRanks": "Kubernetes",
    "FlexibleArgumentParser": "vLLM",
    "_calculate_retry_timeout": "openai-python",
    "dynamo": "ai-dynamo",
    "grpc": "gRPC",
    "human_readable_int": "vLLM",
    "vllm": "vLLM",
}
FIELD_ROOTS = {"spec", "status", "error"}  # of a Kubernetes object, and of an error response

DESCRIPTION = re.compile(r"(?:^|[.;:)]\s+|\n\s*)(`?[a-z]\w*`?(?:(?:, | and )`?[a-z]\w*`?)*): ")
QUOTED = re.compile(r"(?<!`)`([A-Za-z_]\w*(?:\.\w+)*)(?:\(\))?`(?!`)", re.ASCII)
WORD = re.compile(r"[A-Za-z_]\w*")
DOTTED = re.compile(r"(?=\b([A-Za-z_]\w*)\.([A-Za-z_]\w*))")
DEFINITION = re.compile(r"^\s*(?:async )?(?:def|class) (\w+)", re.MULTILINE)
MANIFESTS = (".yaml", ".yml", ".json", ".toml", ".sh", ".tpl")
FILE_ENDINGS = (".json", ".yaml", ".md", ".crt", ".key", ".csv", ".html", ".svg", ".sh")
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Repository:
    """Names that the repository defines or uses, docstrings left out."""

    words: set[str] = field(default_factory=set)
    dotted: set[str] = field(default_factory=set)  # `a.b` as it stands in code and manifests
    modules: dict[str, set[str]] = field(default_factory=dict)  # `c`, `b.c` and `a.b.c`: names within
    classes: dict[str, list[ast.ClassDef]] = field(default_factory=dict)


def tracked(*folders: str) -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z", *folders], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def documented_files() -> list[Path]:
    return [
        p for p in tracked(*FOLDERS) if p.suffix == ".py" and not (p.parent.name == "launcher" and p.name in COPIED)
    ]


@cache
def repository() -> Repository:
    found = Repository()
    for path in documented_files():
        _add_code(found, path)
    for path in tracked():
        if path.suffix == ".py":
            _add_module(found, path, set())
        elif path.suffix in MANIFESTS and path.stat().st_size < 500_000:
            _add_text(found, path.read_text(errors="ignore"))
        if path.suffix == ".py" and path.parts[len(ROOT.parts)] in ("tests", "e2e", "docs", "charts"):
            found.words |= set(DEFINITION.findall(path.read_text()))
    return found


def _add_text(found: Repository, text: str) -> set[str]:
    words = set(WORD.findall(text))
    found.words |= words
    found.dotted |= {".".join(pair) for pair in DOTTED.findall(text)}
    return words


def _add_module(found: Repository, path: Path, within: set[str]) -> None:
    """Enter a module under its name and under every end of its dotted path, and so each of its packages."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    for end in range(1, len(parts) + 1):
        for start in range(end):
            inside = within if end == len(parts) else set()
            found.modules.setdefault(".".join(parts[start:end]), set()).update(inside)
    found.words |= set(parts)


def _add_code(found: Repository, path: Path) -> None:
    within: set[str] = set()
    texts = {id(n.body[0].value) for n in documented(parsed(path)) if isinstance(n.body[0], ast.Expr)}  # docstrings
    for node in ast.walk(parsed(path)):
        if id(node) in texts:
            continue
        match node:
            case ast.Name(id=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
                within.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                within.add(name)
            case ast.ClassDef(name=name):
                within.add(name)
                found.classes.setdefault(name, []).append(node)
            case ast.Attribute(value=inner, attr=name):
                within.add(name)
                found.dotted.add(f"{inner.id if isinstance(inner, ast.Name) else getattr(inner, 'attr', '')}.{name}")
            case ast.alias(name=name):
                within.update(name.split("."))
            case ast.Constant(value=str(text)):
                within |= _add_text(found, text)
    found.words |= within
    _add_module(found, path, within)


def documented(module: ast.Module) -> Iterator[Documented]:
    for node in ast.walk(module):
        if isinstance(node, Documented) and ast.get_docstring(node) is not None:
            yield node


def described(docstring: str) -> set[str]:
    """Names that a docstring describes: those before a colon that starts a sentence."""
    return {name.strip("`") for match in DESCRIPTION.finditer(docstring) for name in re.split(r", | and ", match[1])}


def describable(node: ast.ClassDef | Function) -> set[str]:
    """Parameters and fields of the node, and the fields and keys of what a function returns."""
    if isinstance(node, ast.ClassDef):
        return _members(node, set())
    names = {arg.arg for arg in ast.walk(node.args) if isinstance(arg, ast.arg)}
    for part in ast.walk(node):
        match part:
            case ast.Constant(value=str(key)):
                names.add(key)
            case ast.keyword(arg=str(key)) | ast.Name(id=key) | ast.arg(arg=key):
                names.add(key)
    for part in ast.walk(node.returns) if node.returns else ():
        if isinstance(part, ast.Name):
            names |= _members_of(part.id, set())
    return names


def _members(node: ast.ClassDef, seen: set[str]) -> set[str]:
    names = set()
    for part in ast.walk(node):
        match part:
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.Attribute(value=ast.Name(id="self"), attr=name) | ast.FunctionDef(name=name):
                names.add(name)
    for base in node.bases:
        for part in ast.walk(base):
            if isinstance(part, ast.Name):
                names |= _members_of(part.id, seen)
    return names


def _members_of(name: str, seen: set[str]) -> set[str]:
    if name in seen:
        return set()
    return {n for node in repository().classes.get(name, ()) for n in _members(node, seen | {name})}


def exists(name: str) -> bool:
    head, _, rest = name.partition(".")
    if name in OTHER_PROJECTS or head in OTHER_PROJECTS or head in sys.stdlib_module_names or hasattr(builtins, head):
        return True
    known = repository()
    if not rest:
        return head in known.words
    if head in FIELD_ROOTS:
        return all(part in known.words for part in rest.split("."))
    before, _, last = name.rpartition(".")
    if name in known.modules or name in known.dotted or name.endswith(FILE_ENDINGS):
        return True
    if before in known.modules:
        return last in known.modules[before]
    before, _, owner = before.rpartition(".")
    owner = owner or before
    return any(last in _members(node, set()) for node in known.classes.get(owner, ()))


def test_docstrings_describe_names_that_exist() -> None:
    stale = [f"{path.relative_to(ROOT)}: {name}" for path in documented_files() for name in _stale_names(path)]
    assert not stale, "docstrings name what is not there:\n" + "\n".join(stale)


def _stale_names(path: Path) -> Iterator[str]:
    for node in documented(parsed(path)):
        text = ast.get_docstring(node) or ""
        if not isinstance(node, ast.Module):
            yield from (f"{node.name}: describes `{name}`" for name in sorted(described(text) - describable(node)))
        where = getattr(node, "name", "module")
        yield from (f"{where}: names `{name}`" for name in sorted(set(QUOTED.findall(text))) if not exists(name))


def test_renamed_parameter_and_field_are_found() -> None:
    module = ast.parse(
        'def f(rate, limit_s=1):\n    """Return it. rate, speed: requests/s. old_s: limit. `limit_s`: kept."""\n'
        'class A:\n    """One. size, weight: of it."""\n    size: int\n'
    )
    function, owner = module.body
    assert isinstance(function, ast.FunctionDef)
    assert isinstance(owner, ast.ClassDef)
    assert described(ast.get_docstring(function) or "") - describable(function) == {"speed", "old_s"}
    assert described(ast.get_docstring(owner) or "") - describable(owner) == {"weight"}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tpot_s", True),
        ("core.capacity.tier_model", True),
        ("tier_model.TierSpec", True),
        ("TierSpec.slo", True),
        ("spec.engine.runtime", True),
        ("asyncio.sleep", True),
        ("no_such_word_here", False),
        ("knee.Tier", False),
        ("tier_model.NoSuchClass", False),
        ("core.capacity.no_such_module", False),
    ],
)
def test_quoted_name_is_looked_up_in_repository(name: str, expected: bool) -> None:
    assert exists(name) is expected
