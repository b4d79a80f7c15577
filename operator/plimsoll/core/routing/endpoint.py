"""The inputs of a pick: engine endpoints, their load, and the size of a prompt."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, NamedTuple, Protocol

from plimsoll.core.types import Role

POSITION_MASK: Final = (1 << 16) - 1  # bits of a rank that hold the position
_PICK_SHIFT: Final = 16  # lowest bit of the last pick number
_INFLIGHT_SHIFT: Final = 64
SUSPECT_RANK: Final = 1 << 112  # lowest rank of a suspect endpoint


class Leaving(Enum):
    """How an engine pod leaves that is being deleted.

    One that hands over takes requests until another engine is ready. On a drained node it gives no room to others.
    """

    NO = auto()
    AT_ONCE = auto()
    HANDS_OVER = auto()
    HANDS_OVER_ON_DRAINED_NODE = auto()

    @property
    def hands_over(self) -> bool:
        return self in (Leaving.HANDS_OVER, Leaving.HANDS_OVER_ON_DRAINED_NODE)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One engine pod.

    `address` is the `ip:port` of its API (IPv6 in brackets). Engines of the same `revision` can exchange KV blocks.
    `ready` is the launcher's readiness; a draining pod is not ready. `leaving` says how the pod is being deleted.
    `last` means that it leaves and serves on, because the tier has no other ready engine. `routable` means that Envoy
    reports it healthy. Decode engines call a prefill engine directly, without Envoy. `tls_name` is the name
    in the certificate of one that requires mutual TLS, "" for plain HTTP.
    """

    address: str
    pod: str
    role: Role
    revision: str
    ready: bool
    leaving: Leaving = Leaving.NO
    last: bool = False
    routable: bool = False
    tls_name: str = ""

    @property
    def available(self) -> bool:
        """Whether Envoy may route to it, or a decode engine may use it for remote prefill."""
        return self.ready and (self.last or self.leaving is Leaving.NO)


class RankObserver(Protocol):
    """An index of loads, ordered by rank."""

    def on_rank_change(self, old_rank: int, rank: int) -> None:
        """The rank of one load changed from `old_rank` to `rank`."""

    def on_detach(self) -> None:
        """One load now reports its changes to another observer."""


class EndpointLoad:
    """The load of one endpoint.

    `inflight` counts requests that are sent and not completed. `last_pick` is the number of the last pick that chose it
    and breaks ties fairly. `suspect` means that it recently refused or reset a connection; it is chosen only if all
    others are suspect. `rank` combines all of these into one number, lower is better: suspect, requests in flight, the
    oldest last pick, and the position in its index (at most POSITION_MASK). The observer is notified of each change, so
    a pick reads no load.
    """

    __slots__ = ("_inflight", "_last_pick", "_observer", "_suspect", "rank")

    def __init__(self, inflight: int = 0, last_pick: int = 0, suspect: bool = False) -> None:
        self._inflight, self._last_pick, self._suspect = inflight, last_pick, suspect
        self.rank = (inflight << _INFLIGHT_SHIFT) + (last_pick << _PICK_SHIFT) + SUSPECT_RANK * suspect
        self._observer: RankObserver | None = None

    @property
    def inflight(self) -> int:
        return self._inflight

    @inflight.setter
    def inflight(self, inflight: int) -> None:
        self.update(inflight, self._last_pick)

    @property
    def last_pick(self) -> int:
        return self._last_pick

    @last_pick.setter
    def last_pick(self, number: int) -> None:
        self.update(self._inflight, number)

    @property
    def suspect(self) -> bool:
        return self._suspect

    @suspect.setter
    def suspect(self, suspect: bool) -> None:
        self._change_rank(SUSPECT_RANK * (suspect - self._suspect))
        self._suspect = suspect

    def attach(self, observer: RankObserver, position: int) -> None:
        """Report rank changes to this observer only. `position` is this load's position there."""
        if self._observer is not None:
            self._observer.on_detach()
        self._observer = observer
        self.rank += position - (self.rank & POSITION_MASK)

    def update(self, inflight: int, last_pick: int) -> None:
        """Set both values at once."""
        self._change_rank(
            ((inflight - self._inflight) << _INFLIGHT_SHIFT) + ((last_pick - self._last_pick) << _PICK_SHIFT)
        )
        self._inflight, self._last_pick = inflight, last_pick

    def _change_rank(self, delta: int) -> None:
        old_rank = self.rank
        self.rank = rank = old_rank + delta
        if delta and self._observer is not None:
            self._observer.on_rank_change(old_rank, rank)


class Prompt(NamedTuple):
    """The size of a request: tokens of one prompt (estimated unless sent as token IDs), and sequences."""

    tokens: int
    sequences: int = 1
