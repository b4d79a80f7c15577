"""Running a program whose imports are exempt from garbage collection."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher import fast_import
from launcher.contract import IMAGE_ROOT

PROGRAM = """
import gc, json, sys
import heavy
print(json.dumps([sys.argv, gc.isenabled(), heavy.COLLECTED, heavy.ENABLED, gc.get_freeze_count() > 1000]))
sys.exit(7)
"""
HEAVY = """
import gc
before = gc.get_stats()[0]["collections"]
OBJECTS = [[] for _ in range(100_000)]
COLLECTED = gc.get_stats()[0]["collections"] - before
ENABLED = gc.isenabled()
"""
MAIN = "import sys; from launcher import fast_import; fast_import.main(sys.argv[1:], ('heavy', 'missing', 'broken'))"


def run(folder: Path, first_line: str, text: str = PROGRAM) -> subprocess.CompletedProcess[str]:
    """Run a program named `tool` on the path, with the modules `heavy` and `broken` beside it."""
    program = folder / "tool"
    program.write_text(f"#!{first_line}\n{text}")
    program.chmod(0o755)
    (folder / "heavy.py").write_text(HEAVY)
    (folder / "broken.py").write_text("raise RuntimeError('no driver')")
    return subprocess.run(
        [sys.executable, "-P", "-c", MAIN, "tool", "serve", "--port", "1"],
        env={
            "PATH": f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": f"{IMAGE_ROOT}:{folder}",
        },
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("interpreter", [sys.executable, "/usr/bin/env python3"])
def test_imports_are_frozen_without_collections(tmp_path: Path, interpreter: str) -> None:
    done = run(tmp_path, interpreter)
    assert done.returncode == 7, done.stderr
    assert json.loads(done.stdout) == [[str(tmp_path / "tool"), "serve", "--port", "1"], True, 0, False, True]


def test_failed_import_is_left_to_the_program(tmp_path: Path) -> None:
    done = run(tmp_path, sys.executable, "import broken")
    assert "RuntimeError: no driver" in done.stderr
    assert done.returncode == 1


def test_program_of_another_interpreter_is_executed(tmp_path: Path) -> None:
    done = run(tmp_path, "/bin/sh", 'echo "$0" "$@"; exit 3')
    assert (done.stdout.split(), done.returncode) == ([str(tmp_path / "tool"), "serve", "--port", "1"], 3)


def test_program_of_another_environment_is_executed(tmp_path: Path) -> None:
    (tmp_path / "python3").symlink_to(Path(sys.executable).resolve())
    assert not fast_import.is_this_interpreter(str(tmp_path / "python3"))
    assert not fast_import.is_this_interpreter("")
    assert fast_import.is_this_interpreter(sys.executable)


def test_missing_program_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no-such-program"):
        fast_import.main(["no-such-program"])


@pytest.mark.parametrize(
    ("line", "interpreter"),
    [("#!/opt/vllm/bin/python3\n", "/opt/vllm/bin/python3"), ("\x7fELF", ""), ("#!/bin/a b", "")],
)
def test_interpreter_is_that_of_the_first_line(tmp_path: Path, line: str, interpreter: str) -> None:
    (tmp_path / "tool").write_text(line)
    assert fast_import.interpreter_of(tmp_path / "tool") == interpreter
