"""The figures of the code's size count what they say."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from bench import figures


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_code_and_words_of_a_small_tree_are_counted(tmp_path: Path) -> None:
    write(tmp_path / "operator/plimsoll/a.py", "x = 1\ny = 2\n")
    write(tmp_path / "operator/plimsoll/core/b.py", "z = 3\n")
    write(tmp_path / "operator/plimsoll/core/data.json", "{}\n")
    write(tmp_path / "docs/index.md", "# Four words of docs\n\n| | - |\n|---|---|\n")
    write(tmp_path / "docs/tasks/one.md", "Do this.\n")
    write(tmp_path / "docs/design/why.md", "Not for users.\n")
    write(tmp_path / "docs/evaluation/seen.md", "Nor this.\n")
    assert figures.count_code(tmp_path, "operator/plimsoll") == (2, 3)
    assert figures.count_code(tmp_path, "operator/plimsoll/core") == (1, 1)
    assert figures.count_words(tmp_path) == 4 + 2


def test_private_words_of_a_small_tree_are_counted(tmp_path: Path) -> None:
    write(tmp_path / "bench/private_words.txt", "# Comment of Told\nTold leap\nmissCost\n")
    write(tmp_path / "operator/plimsoll/a.py", "class Told: pass\n\nleap_to = is_leap(Tolder, leaps)\n")
    write(tmp_path / "docs/index.md", "Set `missCost`.\n")
    write(tmp_path / "docs/evaluation/seen.md", "Told.\n")
    assert figures.private_words(tmp_path) == ["Told", "leap", "missCost"]
    assert figures.count_private_words(tmp_path) == {"Told": 1, "leap": 2, "missCost": 1}


def test_stage_seconds_are_read_from_the_logs(tmp_path: Path) -> None:
    assert figures.stage_seconds(tmp_path) == {}
    write(tmp_path / "build/log/test.seconds", "245\n")
    write(tmp_path / "build/log/test.log", "9 passed\n")
    assert figures.stage_seconds(tmp_path) == {"test": 245}


def test_traced_files_are_those_whose_functions_run(tmp_path: Path) -> None:
    write(tmp_path / "code/called.py", "def run():\n    return 1\n")
    write(tmp_path / "code/idle.py", "def run():\n    return 2\n")
    write(tmp_path / "other/called.py", "def run():\n    return 3\n")
    modules = []
    for name in ("code/called", "code/idle", "other/called"):
        spec = importlib.util.spec_from_file_location(name.replace("/", "_"), tmp_path / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        modules.append(importlib.util.module_from_spec(spec))
        spec.loader.exec_module(modules[-1])
    called, _, other = modules
    assert figures.traced_files(tmp_path, "code", lambda: (called.run(), other.run())) == ["called.py"]


def test_decision_and_request_pass_their_entry_files() -> None:
    root = figures.ROOT
    decision = figures.traced_files(root, "operator/plimsoll", figures.one_decision())
    request = figures.traced_files(root, "operator/plimsoll", figures.one_request())
    assert {"core/autoscaling/fleet_decisions.py", "core/autoscaling/recommend.py"} <= {*decision}
    assert {"gateway/picker.py", "core/admission/controller.py"} <= {*request}
