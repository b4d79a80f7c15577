"""The page's pictures show the kept results."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from e2e.gpu import pictures
from e2e.gpu.settings import CHECKOUT

PAGE = (CHECKOUT / "docs/evaluation/gpu-cluster.md").read_text()


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_picture_is_of_the_kept_result(name: str) -> None:
    """After a change of either: python -m e2e.gpu.pictures."""
    drawn = (pictures.OUT / f"{name}.svg").read_text()
    assert drawn == pictures.rendered(name)
    assert ElementTree.fromstring(drawn).tag.endswith("svg")
    assert f"(gpu-cluster/{name}.svg)" in PAGE


def test_engines_that_leave_are_not_counted() -> None:
    changes = [
        {"at": -5.0, "pods": [{"ready": False, "deleting": False}]},
        {"at": -1.0, "pods": [{"ready": True, "deleting": False}]},
        {"at": 4.0, "pods": [{"ready": True, "deleting": False}, {"ready": True, "deleting": True}]},
        {"at": 6.0, "pods": [{"ready": True, "deleting": False}, {"ready": False, "deleting": False}]},
    ]
    ordered, ready = pictures.engines(changes, 10.0)
    assert ordered == [(0.0, 1.0), (4.0, 1.0), (6.0, 2.0), (10.0, 2.0)]
    assert ready == [(0.0, 1.0), (4.0, 1.0), (6.0, 1.0), (10.0, 1.0)]
