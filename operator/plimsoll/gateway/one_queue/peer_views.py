"""What the other gateways know of who owns what, and whether all agree.

Problem: a gateway whose list of pods is old may consider itself the owner of a service that another one owns. Each of
the two would hand out all slots of the engines.

Idea: each ping and its answer carry a digest of the sender's view: the rule, the pods that may own, and the fallbacks.
If a connected gateway has had another view for `SETTLE_SECONDS`, no gateway hands out all slots: each decides with an
equal share, until the views agree. Lists of pods differ for a moment whenever one changes, which changes nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

from plimsoll.gateway.one_queue.ownership import Ownership
from plimsoll.telemetry import gateway_metrics

log = logging.getLogger(__name__)

SETTLE_SECONDS: Final = 1.0  # of another view before slots are shared; watches deliver a change in less


class PeerViews:
    """The views of the connected gateways, by name. One that reports none, of an earlier release, is not compared."""

    def __init__(self, ownership: Ownership, on_change: Callable[[], None]) -> None:
        """`on_change` is called when the views begin or end to differ."""
        self._ownership = ownership
        self._on_change = on_change
        self._views: dict[str, bytes] = {}
        self._since_s: float | None = None
        self.differ = False

    @property
    def own(self) -> bytes:
        """The view of this gateway."""
        return self._ownership.view

    @property
    def gateways(self) -> int:
        """The number of gateways to share with while views differ: those in the own list, and those of other views."""
        return len(self._ownership.candidates | {self._ownership.own_name} | self._others())

    def record(self, gateway: str, view: bytes) -> None:
        """Record what a connected gateway has sent."""
        self._views[gateway] = view
        self.check()

    def drop(self, gateway: str) -> None:
        """Forget a gateway to which a connection has ended; its next ping comes on the other one, if there is one."""
        if self._views.pop(gateway, None) is not None:
            self.check()

    def check(self) -> None:
        """Compare the views. Call this too when the own view has changed."""
        others, now = self._others(), time.monotonic()
        self._since_s = None if not others else now if self._since_s is None else self._since_s
        differ = self._since_s is not None and now - self._since_s >= SETTLE_SECONDS
        if differ == self.differ:
            return
        self.differ = differ
        gateway_metrics.GATEWAY_VIEWS_DIFFER.set(differ)
        if differ:
            names = ", ".join(sorted(others)[:10])
            log.warning("another list of gateways or fallbacks is known to %s: deciding with an equal share", names)
        else:
            log.info("all connected gateways know the same list of gateways again")
        self._on_change()

    def _others(self) -> set[str]:
        return {name for name, view in self._views.items() if view and view != self._ownership.view}
