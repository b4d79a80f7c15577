"""Commands in the documentation can be given: verbs, options, modules and files exist."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from plimsoll.cli import main
from tests.chart.rendering import ROOT
from tests.docs.test_snippets import blocks, pages

SHELL = {"bash", "sh", "console"}
INLINE_COMMAND = re.compile(r"(?<!`)`((?:kubectl )?plimsoll [^`]+|make [^`]+|python -m [^`]+)`(?!`)")
FILES = re.compile(r"(?<![\w./-])(?:bench|charts|crds|docs|e2e|engine-image|operator|requirements|tests)/[\w./-]+\w")


def commands() -> list[object]:
    """Every command of shell blocks and of the text, and whether it stands there whole."""
    found = []
    for page in pages():
        name = str(page.relative_to(ROOT))
        for block in blocks(page):
            if block.language in SHELL:
                found += [pytest.param(line, True, id=f"{name}:{block.line}") for line in _lines(block.text)]
        for number, line in enumerate(page.read_text().splitlines(), 1):
            found += [pytest.param(match[1], False, id=f"{name}:{number}") for match in INLINE_COMMAND.finditer(line)]
    return found


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


@pytest.mark.parametrize(("command", "whole"), commands())
def test_documented_command_is_valid(command: str, whole: bool) -> None:
    words = _words(command)
    if not words or "..." in words or "…" in command:
        return
    if words[0] == "plimsoll":
        assert _is_taken(words[1:] if whole else [*words[1:], "--help"]), command
    if words[0] == "make":
        verbs = re.findall(r"^([a-z0-9-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert set(word for word in words[1:] if "=" not in word) <= set(verbs)
    if "-m" in words and words[0].startswith("python"):
        assert find_spec(words[words.index("-m") + 1]) is not None


def _is_taken(words: list[str]) -> bool:
    """Whether the program's own parser takes them; with --help, nothing need be complete."""
    try:
        main.build_parser().parse_args(words)
    except SystemExit as end:
        return end.code == 0
    return True


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_documented_file_path_exists(page: Path) -> None:
    named = {path.rstrip(".") for path in FILES.findall(page.read_text())}
    assert [path for path in sorted(named) if not any(ROOT.glob(path)) and not any(page.parent.glob(path))] == []
