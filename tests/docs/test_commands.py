"""Commands in the documentation can be given: verbs, options, modules and files exist."""

from __future__ import annotations

import re
import shlex
from argparse import ArgumentParser
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from plimsoll.cli import main
from tests.chart.rendering import ROOT
from tests.docs.test_snippets import blocks, pages

SHELL = {"bash", "sh", "console"}
INLINE_COMMAND = re.compile(r"(?<!`)`((?:kubectl )?plimsoll [^`]+|make [^`]+|python -m [^`]+)`(?!`)")
FILES = re.compile(r"(?<![\w./-])(?:bench|charts|crds|docs|e2e|engine-image|operator|requirements|tests)/[\w./-]+\w")


def commands() -> Iterator[tuple[str, str, bool]]:
    """Every command of shell blocks and of the text: page and line, the command, and whether it stands there whole."""
    for page in pages():
        name = str(page.relative_to(ROOT))
        for block in blocks(page):
            if block.language in SHELL:
                yield from ((f"{name}:{block.line}", line, True) for line in _lines(block.text))
        for number, line in enumerate(page.read_text().splitlines(), 1):
            yield from ((f"{name}:{number}", match[1], False) for match in INLINE_COMMAND.finditer(line))


def _lines(text: str) -> Iterator[str]:
    text = re.sub(r"<<'?(\w+)'?.*?^\1$", "", text, flags=re.MULTILINE | re.DOTALL)
    for line in re.sub(r"\\\n\s*|(?<=\|)\n\s*", " ", text).splitlines():
        command = re.split(r"\s#\s|^#|[|;&]|\s>", line.strip().removeprefix("$ "))[0].strip()
        if command:
            yield command


def _words(command: str) -> list[str]:
    """Without what is set for it, and without what is wrapped around it."""
    words = shlex.split(command)
    while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        words = words[1:]
    return words[1:] if words[:2] == ["kubectl", "plimsoll"] else words


def test_documented_commands_are_valid() -> None:
    assert [(place, command) for place, command, whole in commands() if not _is_valid(command, whole)] == []


def _is_valid(command: str, whole: bool) -> bool:
    words = _words(command)
    if not words or "..." in words or "…" in command:
        return True
    if words[0] == "plimsoll":
        return _is_taken(words[1:] if whole else [*words[1:], "--help"])
    if words[0] == "make":
        verbs = re.findall(r"^([a-z0-9-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return set(word for word in words[1:] if "=" not in word) <= set(verbs)
    if "-m" in words and words[0].startswith("python"):
        return find_spec(words[words.index("-m") + 1]) is not None
    return True


def _is_taken(words: list[str]) -> bool:
    """Whether the program's own parser takes them; with --help, nothing need be complete."""
    try:
        _parser().parse_args(words)
    except SystemExit as end:
        return end.code == 0
    return True


@cache
def _parser() -> ArgumentParser:
    return main.build_parser()


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_documented_file_path_exists(page: Path) -> None:
    named = {path.rstrip(".") for path in FILES.findall(page.read_text())}
    assert [path for path in sorted(named) if not any(ROOT.glob(path)) and not any(page.parent.glob(path))] == []
