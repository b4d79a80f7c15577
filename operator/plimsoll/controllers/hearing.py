"""Who tells of a service, who does not, and which gateways do not go by what they are told. Pure.

Problem: a gateway that cannot read the service's status (it is of another release, or may not watch the object any
more) goes on without a gate, or by what was true once, and serves: nothing fails, and only its own log says so.

Idea: gateways tell with their counts which version of the object they have, whether they let requests in by it, and
what of it they cannot read. What differs for so long that no write on its way explains it is told, with the remedy.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from plimsoll.core.autoscaler import Seen
from plimsoll.core.picking.endpoint import Role
from plimsoll.core.ports import Taken

SILENT_SECONDS: Final = 15.0  # a gateway that is late now and then is no news
UNHEARD_SECONDS: Final = 5.0  # a new engine is asked at once; one whose last word is too old is silent for long already
BEHIND_SECONDS: Final = 30.0  # a write reaches gateways within a second, and an API server that restarts in some more

_LOG: Final = "kubectl logs -n plimsoll-system -l app.kubernetes.io/component=gateway -c picker"
_BEHIND: Final = (
    "has an older version of this service than the operator: whether it may watch inferenceservices"
    f" (kubectl auth can-i) and reaches the API server, its log says ({_LOG})"
)
_UNGATED: Final = f"lets in whatever comes, though status.admission is there: why, its log says ({_LOG})"
_UNREAD: Final = (
    "lets in whatever comes, since it cannot read {}: gateways and operator are to be of one release (helm upgrade)"
)


class Silence(NamedTuple):
    """Who has told nothing for a while: all gateways; tiers of which no ready engine does, in their order. behind:
    which gateways do not go by what they are told, and the remedy, in words; None where all do. second_hand: tiers of
    which some engine does not answer, but a store that scrapes it does."""

    gateways: bool = False
    tiers: tuple[str, ...] = ()
    behind: str | None = None
    second_hand: tuple[str, ...] = ()


class _Gateway(NamedTuple):
    """What one goes by; since when it has had this very version while the operator had another, and since when it has
    had no gate; infinite where that is not so."""

    taken: Taken
    older_s: float
    ungated_s: float


@dataclass
class Hearing:
    """Of one service. Times are seconds since the epoch."""

    _heard_s: float = math.inf  # when a gateway last told of it; from the first look on
    _engines_s: dict[str, float] = field(default_factory=dict)  # when each tier's last told, or were not there
    _odd: dict[str, _Gateway] = field(default_factory=dict)  # gateways that do not go by what they are told, by now
    _model_s: float = math.inf  # since when there is a model to let in by

    def took(self, gateway: str, taken: Taken | None, version: int, now_s: float) -> None:
        """A gateway tells what it goes by, None where it is too old to. version: of the operator's own copy."""
        before = self._odd.pop(gateway, None)
        if taken is None or (taken.gated and not _is_older(taken, version)):
            return
        same = before is not None and before.taken.version == taken.version
        self._odd[gateway] = _Gateway(
            taken,
            min(now_s, before.older_s if before and same else math.inf) if _is_older(taken, version) else math.inf,
            math.inf if taken.gated else min(now_s, before.ungated_s if before else math.inf),
        )

    def silence(self, seen: Seen, told: bool, gateways: Collection[str], now_s: float) -> Silence:
        """Who has told nothing, or gone by nothing, for so long that it is news.

        told: whether there is a model to let in by. gateways: those that exist.
        """
        if seen.heard.coverage or self._heard_s > now_s:
            self._heard_s = now_s
        for name, tier in seen.tiers.items():
            heard = seen.heard.tiers.get(Role(name))
            if not tier.ready or (heard is not None and heard.coverage) or self._engines_s.get(name, math.inf) > now_s:
                self._engines_s[name] = now_s
        mute = tuple(name for name in seen.tiers if now_s - self._engines_s[name] > UNHEARD_SECONDS)
        self._model_s = min(self._model_s, now_s) if told else math.inf
        behind = self._behind(gateways, now_s) if self._odd else None
        return Silence(now_s - self._heard_s > SILENT_SECONDS, mute, behind)

    def _behind(self, gateways: Collection[str], now_s: float) -> str | None:
        for gone in self._odd.keys() - set(gateways):
            del self._odd[gone]
        wrong = Counter(words for one in self._odd.values() if (words := self._wrong(one, now_s)))
        told = (f"of {len(gateways)} gateways {count} {words}" for words, count in sorted(wrong.items()))
        return "; ".join(told) or None

    def _wrong(self, gateway: _Gateway, now_s: float) -> str | None:
        if now_s - max(gateway.ungated_s, self._model_s) > BEHIND_SECONDS:
            return _UNREAD.format(gateway.taken.unread) if gateway.taken.unread else _UNGATED
        return _BEHIND if now_s - gateway.older_s > BEHIND_SECONDS else None


def _is_older(taken: Taken, version: int) -> bool:
    return taken.version.isdecimal() and int(taken.version) < version
