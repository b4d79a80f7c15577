"""What a choice is made from: engine pods as they stand, what each of them holds, and the size of a prompt."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple, Protocol

PLACES: Final = (1 << 16) - 1  # the bits of a rank that hold a place
_TURNS: Final = 16  # where the bits of a turn begin
_INFLIGHT: Final = 64
DOUBTFUL: Final = 1 << 112  # the least rank of a load in doubt


class Role(StrEnum):
    """What an engine does; `serve` does both."""

    PREFILL = "prefill"
    DECODE = "decode"
    SERVE = "serve"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One engine pod.

    address: `ip:port` of its API (IPv6 in brackets). revision: engines of one revision can exchange KV blocks.
    ready: its launcher says so; a draining pod is not ready. terminating: its deletion was asked for.
    routable: the proxy lists it as healthy; a prefill engine is called by decode engines, so it needs no proxy.
    """

    address: str
    pod: str
    role: Role
    revision: str
    ready: bool
    terminating: bool = False
    routable: bool = False

    @property
    def live(self) -> bool:
        """May be given to the proxy, or to a decode engine as its prefill engine."""
        return self.ready and not self.terminating


class Order(Protocol):
    """Loads in the order of their ranks."""

    def move(self, before: int, rank: int) -> None:
        """The rank of one of them was `before` and is another one now."""

    def lose(self) -> None:
        """One of the loads tells another order of its moves from now on."""


class Load:
    """What is known of an endpoint's work.

    inflight: requests sent and not ended. turn: number of the last pick that chose it; breaks ties fairly.
    doubtful: it lately refused or reset a connection; taken only where nothing better is left.
    rank: all of these as one number, less is better: in doubt or not, then requests in flight, then whose last turn is
    longest ago, then its place in its order, at most PLACES. That order is told of every move, so that a pick reads no
    load at all.
    """

    __slots__ = ("_doubtful", "_inflight", "_order", "_turn", "rank")

    def __init__(self, inflight: int = 0, turn: int = 0, doubtful: bool = False) -> None:
        self._inflight, self._turn, self._doubtful = inflight, turn, doubtful
        self.rank = (inflight << _INFLIGHT) + (turn << _TURNS) + DOUBTFUL * doubtful
        self._order: Order | None = None

    @property
    def inflight(self) -> int:
        return self._inflight

    @inflight.setter
    def inflight(self, inflight: int) -> None:
        self.busy(inflight, self._turn)

    @property
    def turn(self) -> int:
        return self._turn

    @turn.setter
    def turn(self, turn: int) -> None:
        self.busy(self._inflight, turn)

    @property
    def doubtful(self) -> bool:
        return self._doubtful

    @doubtful.setter
    def doubtful(self, doubtful: bool) -> None:
        self._move(DOUBTFUL * (doubtful - self._doubtful))
        self._doubtful = doubtful

    def sit(self, order: Order, place: int) -> None:
        """It tells this order of its moves from now on, and no other."""
        if self._order is not None:
            self._order.lose()
        self._order = order
        self.rank += place - (self.rank & PLACES)

    def busy(self, inflight: int, turn: int) -> None:
        """Both at once."""
        self._move(((inflight - self._inflight) << _INFLIGHT) + ((turn - self._turn) << _TURNS))
        self._inflight, self._turn = inflight, turn

    def _move(self, by: int) -> None:
        before = self.rank
        self.rank = rank = before + by
        if by and self._order is not None:
            self._order.move(before, rank)


class Prompt(NamedTuple):
    """Size of a request: tokens of one prompt (counted where they come as numbers, else estimated), and sequences."""

    tokens: int
    sequences: int = 1
