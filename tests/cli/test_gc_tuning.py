"""How often the operator looks for garbage in circles."""

from __future__ import annotations

import gc
import weakref

from plimsoll.cli import gc_tuning


class Cycle:
    def __init__(self) -> None:
        self.me = self


def test_reduce_full_collections_still_frees_cycles() -> None:
    before = gc.get_threshold()
    try:
        gc_tuning.reduce_full_collections()
        assert gc.isenabled()
        assert gc.get_threshold() == gc_tuning.GC_THRESHOLDS
        lost = weakref.ref(Cycle())
        gc.collect()
        assert lost() is None
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
