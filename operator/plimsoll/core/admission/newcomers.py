"""How much work newcomers bring to one gate: what tickets may not promise.

Problem: a tenth of what will be ready is often all that is spare. A mean of the last ten seconds is off by as much with
twenty requests a second, so that who was refused in an unlucky second was told not to come back; and just after a leap
it knows half of it, and the first of those refused are told to come too soon.

Idea: the estimate that the fleet is sized by (`forecast.current`), over this gate's own arrivals: a long mean that
begins anew where the load has changed. It needs nobody: it goes on when the operator is away, and where more clients
come to one gateway than to another each has its part.
"""

from __future__ import annotations

from plimsoll.core.forecast import current


class Newcomers:
    """Of one gate. All times are of its clock."""

    def __init__(self, now: float) -> None:
        self._current = current.NOTHING
        self._offered_s = 0.0
        self._seen_s = now

    @property
    def work(self) -> float:
        """GPU-seconds a second that they bring, as far as is known."""
        return self._current.now.level

    def look(self, offered_s: float, now: float) -> None:
        """Once a second or so. offered_s: GPU-seconds of all that have come to the gate, never less than before."""
        passed_s = now - self._seen_s
        if not passed_s > 0.0:
            return
        work = (offered_s - self._offered_s) / passed_s
        self._offered_s, self._seen_s = offered_s, now
        if work > 0.0 or self.work > 0.0:  # of most services nothing comes
            self._current, _ = current.add(self._current, work, passed_s, passed_s)
