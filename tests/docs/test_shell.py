"""What a page shows right after shell commands is what they print. Other shell blocks are not run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chart.rendering import ROOT
from tests.docs.test_snippets import blocks, pages

PROGRAM = "import sys; from plimsoll.cli.main import main; sys.exit(main())"
PAGES_WITH_OUTPUT = [
    page for page in pages() if any(b.language == "bash" and b.printed is not None for b in blocks(page))
]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """The program as `pip install` has it, before all others, and this interpreter as `python3`."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, arguments in (("plimsoll", f"-c '{PROGRAM}'"), ("python3", "")):
        (commands / name).write_text(f'#!/bin/sh\nexec {sys.executable} {arguments} "$@"\n')
        (commands / name).chmod(0o755)
    path = os.pathsep.join([str(commands), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "LC_ALL": "C"}


@pytest.mark.parametrize("page", PAGES_WITH_OUTPUT, ids=lambda page: str(page.relative_to(ROOT)))
def test_documented_commands_print_shown_output(page: Path, tmp_path: Path, environment: dict[str, str]) -> None:
    """All of a page in one empty folder, in their order."""
    folder = tmp_path / "empty"
    folder.mkdir()
    for block in blocks(page):
        if block.language == "bash" and block.printed is not None:
            script = ["bash", "-euo", "pipefail", "-c", block.text]
            done = subprocess.run(script, cwd=folder, env=environment, capture_output=True, text=True, check=False)
            assert done.stdout == block.printed, f"line {block.line}: {done.stderr}"


def test_some_page_has_commands_with_output() -> None:
    assert PAGES_WITH_OUTPUT
