"""The order in which the files of tests start."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.conftest import FOLDER, LONG_FILES, pytest_collection_modifyitems


def test_long_files_exist_once() -> None:
    assert [name for name in LONG_FILES if not (FOLDER / name).is_file()] == []
    assert len(set(LONG_FILES)) == len(LONG_FILES)


def test_long_files_start_first_and_then_those_of_most_tests() -> None:
    names = ["a.py", "b.py", LONG_FILES[1], "b.py", "c.py", LONG_FILES[0]]
    items: list[Any] = [SimpleNamespace(path=FOLDER / name) for name in names]
    pytest_collection_modifyitems(items)
    assert [item.path for item in items] == [
        FOLDER / name for name in (LONG_FILES[0], LONG_FILES[1], "b.py", "b.py", "a.py", "c.py")
    ]
