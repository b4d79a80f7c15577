"""In-flight counts against what the proxy itself reports.

Our count goes up at a pick and down at the access log's record; both are a little off the proxy's moment, and records
can be lost. A difference seen once may be a request on its way; one that is still there at the next look is an error.
"""

from __future__ import annotations


def correction(before: int | None, now: int) -> int:
    """What to add to our own count, from the last two differences (proxy's count minus ours).

    before None: there was no earlier look, so the proxy is believed at once.
    """
    if before is None:
        return now
    if before > 0 and now > 0:
        return min(before, now)
    if before < 0 and now < 0:
        return max(before, now)
    return 0
