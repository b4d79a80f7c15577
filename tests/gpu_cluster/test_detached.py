"""A detached run: what `wait` prints, copies and returns while the run goes on and after it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.gpu import detached, processes
from e2e.gpu.processes import StepFailed

_RUN = """
import pathlib, sys
results, gate = pathlib.Path(sys.argv[-1]), pathlib.Path(sys.argv[1])
for name in ("first", "second"):
    print("begins", name, flush=True)
    (results / f"{name}.logs.tar.zst").write_text(name)
    with gate.open() as line:
        line.read()
    (results / f"{name}.json.gz").write_text(name)
"""


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A pipe that a scenario of the run waits for."""
    monkeypatch.setattr(detached, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(detached, "LOGS", tmp_path)
    monkeypatch.setattr(processes, "_PIDS", tmp_path / "pids.json")
    children: list[subprocess.Popen[bytes]] = []

    def start(name: str, argv: list[str], _variables: object) -> None:
        with (tmp_path / f"{name}.log").open("wb") as log:
            children.append(subprocess.Popen([sys.executable, "-c", _RUN, argv[4], argv[-1]], stdout=log))
        processes._keep({name: children[-1].pid})

    monkeypatch.setattr(processes, "start", start)
    os.mkfifo(tmp_path / "gate")
    yield tmp_path / "gate"
    for child in children:
        child.kill()
        child.wait()


def test_wait_copies_what_is_over_and_ends_with_the_run(
    gate: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    detached.begin([str(gate)])
    with pytest.raises(StepFailed, match="goes on"):
        detached.begin([str(gate)])
    assert not detached.follow(out, 0.0)
    assert list(out.iterdir()) == []  # logs of a scenario that is not over stay
    gate.write_text("")
    assert not detached.follow(out, 60.0)
    assert sorted(path.name for path in out.iterdir()) == ["first.json.gz", "first.logs.tar.zst"]
    gate.write_text("")
    while not detached.follow(out, 60.0):
        pass
    assert len(list(out.iterdir())) == 4
    assert "begins second" in capsys.readouterr().out
    assert processes.ended() == []  # later steps do not miss it


def test_wait_without_a_run_fails(gate: Path, tmp_path: Path) -> None:
    with pytest.raises(StepFailed, match="no detached run"):
        detached.follow(tmp_path / "out", 0.0)
