"""Completion follows the parser, in kubectl's protocol and in bash."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from plimsoll.cli.completion import FILES, NO_FILES, candidates
from plimsoll.cli.main import build_parser, main

ROOT = Path(__file__).parents[2]


def services(namespace: str | None) -> list[str]:
    return ["chat", "code"] if namespace is None else [f"{namespace}-chat"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["do"], ["doctor", NO_FILES]),
        (["key", ""], ["create", "list", "revoke", NO_FILES]),
        (["nonsense", "sta"], ["status", NO_FILES]),
        (["check", "--p"], ["--pre", NO_FILES]),
        (["check", "-f", "m"], [FILES]),
        (["check", "--filename", ""], [FILES]),
        (["plan", "--model", ""], [FILES]),
        (["plan", "--weights", ""], ["bf16", "fp8", NO_FILES]),
        (["plan", "--weights", "f"], ["fp8", NO_FILES]),
        (["status", "c"], ["chat", "code", NO_FILES]),
        (["status", "chat", ""], [NO_FILES]),
        (["doctor", "-n", "team", ""], ["team-chat", NO_FILES]),
        (["doctor", "--json", "ch"], ["chat", NO_FILES]),
        (["explain", "--operator-namespace", ""], [NO_FILES]),
        (["key", "create", ""], [NO_FILES]),
    ],
)
def test_completion_follows_the_parser(words: list[str], expected: list[str]) -> None:
    assert candidates(build_parser(), words, services) == expected


def test_completion_of_nothing_lists_all_verbs() -> None:
    found = candidates(build_parser(), [], services)
    assert {"check", "init", "doctor", "completion"} < set(found)


def test_completion_in_bash(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = tmp_path / "kubectl_complete-plimsoll"
    program.write_text(f"#!{sys.executable}\nfrom plimsoll.cli.completion import main\nmain()\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    assert main(["completion", "bash"]) == 0
    (tmp_path / "script").write_text(capsys.readouterr().out)
    words = 'COMP_WORDS=(plimsoll plan --weights ""); COMP_CWORD=3; _plimsoll_complete; echo "${COMPREPLY[*]}"'
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT / "operator")}
    command = ["bash", "-c", f"source {tmp_path}/script; {words}"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert done.stdout == "bf16 fp8\n"


def test_completion_without_cluster_is_silent(tmp_path: Path) -> None:
    call = "from plimsoll.cli.completion import main; main()"
    environment = os.environ | {"PYTHONPATH": str(ROOT / "operator"), "KUBECONFIG": str(tmp_path / "none")}
    command = [sys.executable, "-c", call, "status", ""]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert (done.stdout, done.stderr) == (f"{NO_FILES}\n", "")
