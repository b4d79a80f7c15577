"""How often the operator looks for garbage in circles."""

from __future__ import annotations

import gc
import weakref

from plimsoll.cli import garbage


class Cycle:
    def __init__(self) -> None:
        self.me = self


def test_reduce_full_collections_still_frees_cycles() -> None:
    before = gc.get_threshold()
    try:
        garbage.look_seldom()
        assert gc.isenabled()
        assert gc.get_threshold() == garbage.THRESHOLDS
        lost = weakref.ref(Cycle())
        gc.collect()
        assert lost() is None
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
