"""The engine that fills the caches: it waits for its archive, and is ended before pods start."""

from __future__ import annotations

from pathlib import Path

import pytest

from e2e.gpu import caches

NEVER = "import signal; print('Graph capturing finished', flush=True); signal.pause()"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(caches, "_PIDS", tmp_path / "pids")
    monkeypatch.setattr(caches, "LOGS", tmp_path / "logs")
    return tmp_path


def test_nothing_is_ended_if_none_was_started() -> None:
    caches.finish(30.0)


def test_an_engine_that_has_compiled_is_ended(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    caches.start(["python3", "-c", NEVER], {}, folder)
    pid = int((folder / "pids" / "0").read_text())
    caches.finish(30.0)
    assert not caches._alive(pid)
    assert "caches 0: filled" in capsys.readouterr().out


def test_an_engine_waits_for_its_archive(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    caches.start(["python3", "-c", NEVER], {}, folder / "engine.done")
    caches.finish(0.0)
    assert "not filled in time; it said nothing" in capsys.readouterr().out


def test_an_engine_that_fails_says_why(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    caches.start(["sh", "-c", "echo no device; exit 1"], {}, folder)
    caches.finish(30.0)
    assert "no device" in capsys.readouterr().out


def test_each_set_of_arguments_has_an_engine(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("0", "1"):
        caches.start(["python3", "-c", NEVER], {}, folder, name=name, folder=folder)
    pids = [int((folder / "pids" / name).read_text()) for name in ("0", "1")]
    caches.finish(30.0)
    assert not any(caches._alive(pid) for pid in pids)
    assert "caches 1: filled" in capsys.readouterr().out
