"""How often the operator looks for garbage in circles."""

from __future__ import annotations

import gc
import weakref

from plimsoll.cli import garbage


class Circle:
    def __init__(self) -> None:
        self.me = self


def test_circles_are_found_though_seldom() -> None:
    before = gc.get_threshold()
    try:
        garbage.look_seldom()
        assert gc.isenabled()
        assert gc.get_threshold() == garbage.THRESHOLDS
        lost = weakref.ref(Circle())
        gc.collect()
        assert lost() is None
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
