"""How often operator and gateway look for garbage in circles.

Problem: a tick of a thousand services makes tens of thousands of small values anew and drops as many, and by Python's
own rule (one look for each 700 more) every fifth tick or so looked through all that is remembered: a tenth of a second,
for nothing, since what a tick drops is freed by its counts. So is what a request leaves at the gateway, where each look
would keep those waiting that come meanwhile.

Idea: what was there at the start is never looked at again, and the rest after so many more values that it is by far
the longest-lived look that becomes rare. Circles are still found, later.
"""

from __future__ import annotations

import gc
from typing import Final

THRESHOLDS: Final = (50_000, 20, 50)  # more values than before, and looks of the younger kind for one of the older


def look_seldom() -> None:
    """From now on in this process."""
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
