"""The engine that fills the caches: it waits for its archive, and is ended before pods start."""

from __future__ import annotations

from pathlib import Path

import pytest

from e2e.gpu import caches

NEVER = "import signal; print('Graph capturing finished', flush=True); signal.pause()"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(caches, "_PID", tmp_path / "pid")
    monkeypatch.setattr(caches, "_LOG", tmp_path / "log")
    return tmp_path


def test_nothing_is_ended_if_none_was_started() -> None:
    caches.finish(30.0)


def test_an_engine_that_has_compiled_is_ended(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    caches.start(["python3", "-c", NEVER], {}, folder)
    pid = int((folder / "pid").read_text())
    caches.finish(30.0)
    assert not caches._alive(pid)
    assert "caches: filled" in capsys.readouterr().out


def test_an_engine_waits_for_its_archive(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    caches.start(["python3", "-c", NEVER], {}, folder / "engine.done")
    caches.finish(0.0)
    assert "not filled in time; it said nothing" in capsys.readouterr().out


def test_an_engine_that_fails_says_why(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    caches.start(["sh", "-c", "echo no device; exit 1"], {}, folder)
    caches.finish(30.0)
    assert "no device" in capsys.readouterr().out
