"""What the operator tells the gateways of one service, so that both sides decide by one model.

Problem: gateways decide about each request without asking anybody, come and go, and outlive an operator that is down;
what they were told must be the same for all of them and must not cost a write a second.

Idea: one small value that lies in the service's status. Every gateway reads the same one, a new gateway at once, and
it is written again only where it would change what is decided: the model by a few percent, an expected time, a share.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from itertools import pairwise
from typing import Any, Final

from plimsoll.core.admission.gate import Outlook
from plimsoll.core.admission.limits import Limits

VERSION: Final = 3
MOVED: Final = 0.05  # a figure of the model that has moved by this share is worth a write
MOVED_ANSWERS: Final = 0.1  # so are answers of which that share of their tokens lies elsewhere
MOVED_S: Final = 3.0  # so is an expected time that has moved by so many seconds
MOST_STARTS: Final = 8  # that are told one by one: what more of them would tell is within the doubt of their times

_WHOLE: Final = frozenset({"block_tokens", "token_budget", "kv_tokens", "max_sequences", "batch"})
_PER_CLASS: Final = frozenset({"step_budget_s", "tpot_s"})
_ENDLESS: Final = _PER_CLASS | {"most_spread_s"}  # infinite where no pace is promised
_UNKNOWN: Final = frozenset({"move_token_s"})  # which nobody may know


@dataclass(frozen=True)
class Published:
    """One service. Raises ValueError for limits that were made for other classes.

    classes: their names, in the order of the limits. limits: None while no engine has told what it is: all are let in.
    ready_at_s: Unix time at which the next replica is expected, None where nobody knows. ready_work: GPU-seconds of
    work a second that all which are on their way will carry. starting: replicas start, or will when asked for. shares:
    units of `limits.batch` by gateway; one that has none yet takes an equal share, so as not to refuse all that reach
    it. starts: times, the first of them ready_at_s, each with the work that is carried from then on, the last of them
    ready_work; none where all is there from ready_at_s on.
    """

    classes: tuple[str, ...]
    limits: Limits | None = None
    ready_at_s: float | None = None
    ready_work: float = 0.0
    starting: bool = True
    shares: Mapping[str, int] = field(default_factory=dict)
    starts: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        if self.limits is not None and len(self.limits.tpot_s) != len(self.classes):
            raise ValueError(f"the limits are for {len(self.limits.tpot_s)} classes, not for {len(self.classes)}")

    def units(self, gateway: str) -> int:
        """Sequences of each replica that this gateway may use, at least 1."""
        if self.limits is None:
            return 0
        others = len(self.shares.keys() - {gateway})
        return self.shares.get(gateway) or max(1, self.limits.batch // (others + 1))

    def outlook(self, gateway: str, offered: float, ahead_s: float) -> Outlook:
        """The same for one gateway's gate. offered: work a second that newcomers bring to it. ahead_s: its clock less
        Unix time."""
        if self.limits is None or self.ready_at_s is None:
            return Outlook(starting=self.starting)
        share = min(1.0, self.units(gateway) / self.limits.batch)
        (at_s, spare), *later = (
            (at_s + ahead_s, max(0.0, share * work - offered))
            for at_s, work in self.starts or ((self.ready_at_s, self.ready_work),)
        )
        return Outlook(at_s, spare, self.starting, tuple(later))


def to_dict(published: Published) -> dict[str, Any]:
    """As JSON can hold it; infinity is null, figures have six digits."""
    limits = (
        None if published.limits is None else {name: _plain(value) for name, value in asdict(published.limits).items()}
    )
    return {
        "version": VERSION,
        "classes": list(published.classes),
        "limits": limits,
        "readyAt": None if published.ready_at_s is None else round(published.ready_at_s, 1),
        "readyWork": _plain(published.ready_work),
        "starting": published.starting,
        "shares": dict(sorted(published.shares.items())),
        "starts": [[round(at_s, 1), _plain(work)] for at_s, work in published.starts],
    }


def from_dict(stored: Any) -> Published:
    """What `to_dict` gave. Raises ValueError for anything else: it lies where hands can reach it."""
    if not isinstance(stored, Mapping):
        raise ValueError("no admission model")
    if stored.get("version") != VERSION:
        raise ValueError(f"a model of version {stored.get('version')!r:.40}, not of version {VERSION}")
    try:
        told = stored["limits"]
        return Published(
            classes=tuple(str(name) for name in stored["classes"]),
            limits=None if told is None else _limits(told),
            ready_at_s=None if stored["readyAt"] is None else _number(stored["readyAt"]),
            ready_work=_number(stored["readyWork"]),
            starting=bool(stored["starting"]),
            shares={str(name): _count(units) for name, units in (stored["shares"] or {}).items()},
            starts=tuple((_number(at_s), _number(work)) for at_s, work in stored.get("starts") or ()),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"a part is missing or of another kind: {error}") from error


def moved(old: Published | None, new: Published) -> bool:
    """Whether a gateway that has been told `old` would decide otherwise by `new`."""
    if old is None or (old.classes, old.starting, old.shares) != (new.classes, new.starting, new.shares):
        return True
    if (old.limits is None) != (new.limits is None) or (old.ready_at_s is None) != (new.ready_at_s is None):
        return True
    if old.ready_at_s is not None and new.ready_at_s is not None and abs(new.ready_at_s - old.ready_at_s) > MOVED_S:
        return True
    if _differs(old.ready_work, new.ready_work) or len(old.starts) != len(new.starts):
        return True
    for (before_s, before), (at_s, work) in zip(old.starts, new.starts, strict=True):
        if abs(at_s - before_s) > MOVED_S or _differs(before, work):
            return True
    if old.limits is None or new.limits is None:
        return False
    if _elsewhere(old.limits.answers, new.limits.answers):
        return True
    return any(
        _differs(one, other)
        for name in (f.name for f in fields(Limits) if f.name != "answers")
        for one, other in zip(_each(getattr(old.limits, name)), _each(getattr(new.limits, name)), strict=True)
    )


def _limits(told: Mapping[str, Any]) -> Limits:
    values: dict[str, Any] = {}
    for name in (f.name for f in fields(Limits)):
        if name == "answers":  # which an older operator does not tell
            values[name] = tuple(_number(v) for v in told.get(name) or ())
            continue
        value = told[name]
        if name in _PER_CLASS:
            values[name] = tuple(math.inf if v is None else _number(v) for v in value)
        elif value is None and name in _ENDLESS:
            values[name] = math.inf
        elif value is None and name in _UNKNOWN:
            values[name] = None
        else:
            values[name] = _count(value) if name in _WHOLE else _number(value)
    limits = Limits(**values)
    if any(later < before for before, later in pairwise((0.0, *limits.answers))):
        raise ValueError("answers have to ascend from 0")
    if limits.batch < 1 or limits.max_sequences < 1 or limits.kv_tokens < 1 or not limits.base_s > 0.0:
        raise ValueError("an engine holds at least one sequence and its steps take time")
    return limits


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is no finite number")
    return float(value)


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value


def _elsewhere(old: tuple[float, ...], new: tuple[float, ...]) -> bool:
    """Whether more than MOVED_ANSWERS of all tokens lie in other answers (Wasserstein's distance over the mean)."""
    if len(old) != len(new):
        return True
    return sum(abs(one - other) for one, other in zip(old, new, strict=True)) > MOVED_ANSWERS * sum(old)


def _each(value: float | tuple[float, ...] | None) -> tuple[float | None, ...]:
    return value if isinstance(value, tuple) else (value,)


def _differs(old: float | None, new: float | None) -> bool:
    if old is None or new is None:
        return old is not new
    return old != new and not abs(new - old) <= MOVED * min(abs(old), abs(new))


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_plain(part) for part in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value
