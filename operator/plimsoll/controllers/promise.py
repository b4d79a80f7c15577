"""What a status says of a promise: how it was kept of late, in figures and as a condition. Pure.

Problem: of a promise that has several targets each may be kept often enough, and all of them together not; and what is
not measured must not read as kept.

Idea: one judgement (`core.autoscaler.attained`) for the figures and for the condition, so that they cannot contradict
each other. SLOMet is false where one target alone is missed too often, true where the bound on all of them is within
the promise, and unknown in between and where something is not measured.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, Final

from plimsoll.api.conditions import Condition, Reason, Type
from plimsoll.core import units
from plimsoll.core.autoscaler import Seen
from plimsoll.core.autoscaler.attained import Attained, attained
from plimsoll.core.forecast import Unknown
from plimsoll.core.slo import Slo

Object = dict[str, Any]

SLACK: Final = 0.2  # of what may miss: a promise that was not kept is so again only with so much to spare
GAP_SLACK: Final = 0.1  # of the target of gaps, likewise
MOVED: Final = 0.1  # a figure that has moved by less keeps its old words
_NEAR: Final = 1e-9  # of two shares
_FIGURE: Final = re.compile(r"\(p[^)]*\)|(at least )?\d+% within")


def condition(seen: Seen, slo: Slo, promised: Sequence[Slo], before: Condition | None) -> Condition:
    """SLOMet, by the last minute's answers; `before`, as it was, keeps its words while it is the same.

    slo: the service's. promised: of each class of its requests, by which they are judged.
    """
    shares = attained(seen.heard, *promised)
    holds, reason = _judged(seen, slo, shares, None if before is None else before.reason)
    words = _unknown(seen, shares) if reason is Reason.NOT_MEASURED else _words(seen, slo, promised, shares)
    if before is not None and (before.holds, before.reason) == (holds, reason) and _same(before.message, words):
        return before
    return Condition(Type.SLO_MET, holds, reason, words)


def _same(old: str, new: str) -> bool:
    """Whether they differ by measured figures alone."""
    return _FIGURE.sub("", old) == _FIGURE.sub("", new)


def _judged(seen: Seen, slo: Slo, shares: Attained, before: Reason | None) -> tuple[bool | None, Reason]:
    gap_s, broken = measured(seen)[-1], before is Reason.PROMISE_BROKEN
    if shares.most is not None and not _enough(shares.most, slo, SLACK if broken else 0.0):
        return False, Reason.PROMISE_BROKEN
    if slo.itl_s is not None and gap_s is not None and gap_s > slo.itl_s * (1.0 - (GAP_SLACK if broken else 0.0)):
        return False, Reason.PROMISE_BROKEN
    if isinstance(shares.least, Unknown) or (slo.itl_s is not None and gap_s is None):
        return None, Reason.NOT_MEASURED
    spared = SLACK if before in (Reason.PROMISE_BROKEN, Reason.PROMISE_UNDECIDED) else 0.0
    if not _enough(shares.least, slo, spared):
        return None, Reason.PROMISE_UNDECIDED
    return True, Reason.PROMISE_KEPT


def _enough(share: float, slo: Slo, spared: float) -> bool:
    return share >= 1.0 - (1.0 - slo.share) * (1.0 - spared) - _NEAR


def _words(seen: Seen, slo: Slo, promised: Sequence[Slo], shares: Attained) -> str:
    """What was measured of each target, and of all those of a request together."""
    found = []
    for (name, target_s), value_s in zip(slo.targets, measured(seen), strict=True):
        share = shares.met.get(name)
        figure = "" if value_s is None else f" ({slo.percentile(name)} {duration(value_s)})"
        if share is not None and not isinstance(share, Unknown):
            least = "at least " if name == "TPOT" and len({one.tpot_s for one in promised}) > 1 else ""
            found.append(f"{name} {least}{_percent(share)} within {_target(promised, name)}{figure}")
        elif name == "itl" and target_s is not None and figure:
            found.append(f"{name} target {duration(target_s)}{figure}")
    words = f"{', '.join(found)}; {_percent(slo.share)} promised"
    if len(shares.met) < 2 or isinstance(shares.least, Unknown):
        return words
    exact = shares.most is not None and shares.most - shares.least < _NEAR
    return f"{words}, {'' if exact else 'at least '}{_percent(shares.least)} within all of a request"


def _target(promised: Sequence[Slo], name: str) -> str:
    """What requests are promised, where classes differ from the tightest to the loosest."""
    kinds = {(dict(one.targets)[name], one.ttft_per_1k_tokens_s if name == "TTFT" else 0.0) for one in promised}
    told = [
        duration(target_s) + (f" + {duration(more_s)} per 1k tokens" if more_s else "")
        for target_s, more_s in sorted((target_s, more_s) for target_s, more_s in kinds if target_s is not None)
    ]
    return " to ".join(dict.fromkeys((told[0], told[-1]))) + (" by class" if len(kinds) > 1 else "")


def _unknown(seen: Seen, shares: Attained) -> str:
    found = shares.unknown
    return _not_known("itl", _unknown_gaps(seen)) if found is None else _not_known(*found)


def _not_known(name: str, why: Unknown) -> str:
    return f"{name} is not known: {why.why}"


def figures(seen: Seen, slo: Slo, promised: Sequence[Slo], before: Object) -> Object:
    """The `slo` part of the status; figures of the last one (`before`) are kept where little has changed.

    slo, promised: as for `condition`.
    """
    ttft_s, tpot_s, e2e_s, itl_s = measured(seen)
    found: Object = {"window": "1m"}
    if ttft_s is not None:
        found["ttft"] = _figure(before.get("ttft"), ttft_s)
    if tpot_s is not None:
        found["tpot"] = _figure(before.get("tpot"), tpot_s)
    if e2e_s is not None and slo.e2e_s is not None:
        found["e2e"] = _figure(before.get("e2e"), e2e_s)
    if itl_s is not None and slo.itl_s is not None:
        found["itl"] = _figure(before.get("itl"), itl_s)
    shares = attained(seen.heard, *promised)
    found |= _shares(shares)
    if len(found) == 1:
        return {}
    if shares.unknown is not None:
        found["notKnown"] = _not_known(*shares.unknown)
    if not isinstance(seen.heard.rate_per_s, Unknown):
        found["offered"] = f"{seen.heard.rate_per_s:.2g} req/s"
    return found


def _shares(shares: Attained) -> Object:
    """What of the promise was kept; nothing where nothing is known."""
    met = {name.lower(): _percent(share) for name, share in shares.met.items() if not isinstance(share, Unknown)}
    all_of_them = {"attainment": shares.least, "attainmentOffered": shares.offered}
    whole = {name: _percent(share) for name, share in all_of_them.items() if not isinstance(share, Unknown)}
    return ({"met": met} if met else {}) | whole


def _percent(share: float) -> str:
    """Whole percents; what is short of one by a hair is not it."""
    return f"{math.floor(100.0 * share + _NEAR)}%"


def measured(seen: Seen) -> tuple[float | None, ...]:
    """Promised percentiles as clients saw them, s, in the order of `Slo.targets`: TPOT and gaps in the tier that
    decodes, the others at the gateway."""
    decoding = [told.measured for role, told in seen.heard.tiers.items() if role != "prefill"]
    tpot, itl = ([getattr(one, name) for one in decoding] for name in ("tpot_s", "itl_s"))
    told = ([seen.heard.ttft_s], tpot, [seen.heard.e2e_s], itl)
    return tuple(next((value for value in of if not isinstance(value, Unknown)), None) for of in told)


def _unknown_gaps(seen: Seen) -> Unknown:
    for role, told in seen.heard.tiers.items():
        if role != "prefill" and isinstance(told.measured.itl_s, Unknown):
            return told.measured.itl_s
    return Unknown("no engine is heard")


def _figure(before: Any, seconds: float) -> str:
    """A duration of two digits; the old one where it is still near enough."""
    if isinstance(before, str) and abs(units.parse_duration(before) - seconds) <= MOVED * seconds:
        return before
    return duration(seconds)


def duration(seconds: float) -> str:
    """Two significant digits, in the unit that people would use: 5.1ms, 340ms, 1.2s, 95s."""
    if seconds < 0.000001:
        return "0s"
    digits = 1 - math.floor(math.log10(seconds))
    rounded = round(seconds, digits)
    return units.format_duration(rounded) if rounded < 1.0 else f"{rounded:g}s"
