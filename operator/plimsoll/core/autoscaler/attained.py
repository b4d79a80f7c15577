"""What share of the answers kept what is promised of a request: each target, and all of them together.

Problem: a promise is that a request meets all its targets, and nobody sees all of them of one request. The gateway
times first and last bytes of each, but no tokens; the engines count paces, but in a histogram over all of them.

Idea: a bound that holds whatever requests miss which target. Those late at the gateway are counted one by one; those
too slow are a share of the same minute's requests; at most both together miss (Bonferroni), so at least the rest keep
all. What one of the targets is kept by is told beside it. Of a target that nobody measures nothing is claimed.

Classes may be promised paces of their own, while engines do not know classes: gateways tell how many answers were
promised which pace, engines how many were slower than each. Who of them was slow is not known, so that is a bound too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from plimsoll.core.buckets import count
from plimsoll.core.forecast import Unknown
from plimsoll.core.picking.endpoint import Role
from plimsoll.core.ports import Buckets
from plimsoll.core.signals import Heard
from plimsoll.core.signals.percentile import share_within
from plimsoll.core.slo import Slo

_NOBODY: Final = Unknown("no answer of the last minute can be held against it")
_GATEWAYS_SILENT: Final = Unknown("the gateways do not tell")
_ENGINES_SILENT: Final = Unknown("the engines do not tell")


@dataclass(frozen=True, slots=True)
class Attained:
    """Of the last minute's answers.

    met: share that kept a target, by the name that it has in `Slo.targets`; those promised of a request alone; of
    several paces at least so many. least, most: the share that kept all is between these, `most` by what is known; None
    where nothing is. offered: `least` of all that arrived. missed: of all that arrived, refused or known to have missed
    a target, at most; None likewise.
    """

    met: Mapping[str, float | Unknown]
    least: float | Unknown
    most: float | None
    offered: float | Unknown
    missed: float | None

    @property
    def unknown(self) -> tuple[str, Unknown] | None:
        """A promised target that is not measured, and why; None where there is none."""
        return next(((name, share) for name, share in self.met.items() if isinstance(share, Unknown)), None)


def attained(heard: Heard, *promised: Slo) -> Attained:
    """What is known of the promise now. promised: of each class of requests, or the one of all."""
    (late, *by_target), (fewest, most) = _late(heard), _slow(heard, promised)
    missed = {"TTFT": by_target[0], "TPOT": most, "e2e": by_target[1]}  # gaps are no target of a request
    named = {name for slo in promised for name, target_s in slo.targets if target_s is not None}
    met = {name: _others(share) for name, share in missed.items() if name in named}
    misses, surely = ([late, most], [late, fewest]) if "TPOT" in named else ([late], [late])
    known, sure = ([share for share in shares if not isinstance(share, Unknown)] for shares in (misses, surely))
    unknown = next((share for share in met.values() if isinstance(share, Unknown)), None)
    least = unknown or max(0.0, 1.0 - math.fsum(known))
    shed = heard.shed_share
    return Attained(
        met,
        least,
        1.0 - max(sure) if sure else None,
        least if isinstance(least, Unknown) else least * (1.0 - (0.0 if isinstance(shed, Unknown) else shed)),
        _missed(shed, min(1.0, math.fsum(known)) if known else None),
    )


def _others(share: float | Unknown) -> float | Unknown:
    return share if isinstance(share, Unknown) else 1.0 - share


def _missed(shed: float | Unknown, of_answers: float | None) -> float | None:
    """Of all that arrived, refused ones included; where nobody was answered, the refused ones."""
    if of_answers is None:
        return None if isinstance(shed, Unknown) else shed
    refused = 0.0 if isinstance(shed, Unknown) else shed
    return refused + (1.0 - refused) * of_answers


def _late(heard: Heard) -> tuple[float | Unknown, float | Unknown, float | Unknown]:
    """Shares of the answers that were late at the gateway: in any way, with the first token, with the last."""
    judged = heard.judged
    if judged is None:
        why = heard.ttft_s if isinstance(heard.ttft_s, Unknown) else _GATEWAYS_SILENT
        return why, why, why
    if judged.answers <= 0.0:
        return _NOBODY, _NOBODY, _NOBODY
    in_any, first, last = (min(1.0, missed / judged.answers) for missed in judged[1:])
    return in_any, first, last


def _slow(heard: Heard, promised: Sequence[Slo]) -> tuple[float | Unknown, float | Unknown]:
    """Share of the answers with a pace beyond what was promised of them: at least and at most.

    Of all that are slower than a target, those with a looser one need not have missed theirs; and whoever missed a
    target that is no tighter is slower than it. Nothing more can be said of who was slow.
    """
    mix = _mix(heard, promised)
    if isinstance(mix, Unknown):
        return mix, mix
    fewest, most, tighter = 0.0, 1.0, 0.0
    for target_s, part in sorted(mix.items()):
        slower = _slower(heard, target_s)
        if isinstance(slower, Unknown):
            return slower, slower
        most = min(most, tighter + slower)
        tighter += part
        fewest = max(fewest, slower - (1.0 - tighter))
    return fewest, min(most, tighter)


def _mix(heard: Heard, promised: Sequence[Slo]) -> Mapping[float, float] | Unknown:
    """What share of the answers was promised which pace, s."""
    targets = {slo.tpot_s for slo in promised}
    if len(targets) == 1:
        return {target_s: 1.0 for target_s in targets if target_s is not None}
    if heard.judged is None or heard.paced is None:
        return heard.ttft_s if isinstance(heard.ttft_s, Unknown) else _GATEWAYS_SILENT
    if heard.judged.answers <= 0.0:
        return _NOBODY
    return {target_s: count / heard.judged.answers for target_s, count in heard.paced.items() if count > 0.0}


def _slower(heard: Heard, target_s: float) -> float | Unknown:
    """Share of the answers with a pace beyond a target; a request of one token has none."""
    told = next((told for role, told in heard.tiers.items() if role is not Role.PREFILL), None)
    if told is None:
        return _ENGINES_SILENT
    paces, why = told.paces, told.measured.tpot_s
    if paces is None:
        return why if isinstance(why, Unknown) else _ENGINES_SILENT
    within, paced = share_within(paces, target_s), count(paces)
    if within is None:
        return 0.0 if told.ended > 0.0 else _NOBODY
    if paces.counts[-1] > 0.0 and not _is_told_apart(paces, target_s):
        return Unknown(f"some paces lie beyond the engines' last bucket, {paces.edges[-2:][0]:g} s, and the target too")
    return (1.0 - within) * paced / max(paced, told.ended)


def _is_told_apart(b: Buckets, target_s: float) -> bool:
    """Whether what is in the last bucket, which has no end, is beyond the target for sure."""
    return len(b.edges) > 1 and target_s <= b.edges[-2]
