"""What the whole board plays, in order: a budget may end it anywhere, so that what matters most comes first.

Who plays is a policy's word, or one of these, whose words depend on what was played before (`whole.py`): `followers`,
those that the row's own load names; `fleets`, constant ones from Plimsoll's mean to the least that does as well;
`peers`, each at the settings that were found for its machine; `found`, what else was found on the row; `schedules`,
those that know the future.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from bench.scoreboard.rows import OTHERS, ROWS

NOMINAL: Final = (1.0,)


class Part(NamedTuple):
    """seeds: of Plimsoll, constant fleets and peers, and of a follower that leads."""

    says: str
    rows: tuple[str, ...]
    who: tuple[str, ...]
    seeds: int = 1
    plants: tuple[float, ...] = NOMINAL


_STEPS: Final = ("step-60", "step-0", "step-30", "step-120", "step-240")
_FOLLOWED: Final = (*_STEPS, "ramp-120", "guide")
_PAIRS: Final = ("step-60-pd", "shift-60-pd")
_RETURNING: Final = ("retry-honour", "retry-ignore", "retry-mixed")
_TRACES: Final = ("azure-code", "servegen-large", "servegen-r1")
_HALF_DAY: Final = ("servegen-r1-half-day",)
_CONSTANT: Final = tuple(name for name in ROWS if name.startswith("constant-"))
_CONSTANT_FIRST: Final = _CONSTANT[::4] + _CONSTANT[3::4]  # each rate once, every second one with bursts
_PRICED: Final = ("step-60", "step-120", "step-240")
_PRICES: Final = tuple(f"plimsoll:missCost={cost}" for cost in (0, 5, 10, 80))
_UNSEEN: Final = ("unseen-square", "unseen-flood", "unseen-naps-pd")
_KNOWN: Final = (*_FOLLOWED, *_PAIRS, *_RETURNING)  # rows of half an hour

PLAN: Final = (
    Part("Plimsoll on rows of half an hour", _KNOWN, ("plimsoll",)),
    Part("peers on the step and on the guide", ("step-60", "guide"), ("fleets", "peers", "found")),
    Part("followers", (*_FOLLOWED, *_PAIRS), ("followers",)),
    Part("Plimsoll and followers on other machines", _FOLLOWED, ("plimsoll", "followers"), plants=OTHERS),
    Part("traces", _TRACES, ("plimsoll", "fleets")),
    Part("each constant rate once", _CONSTANT_FIRST, ("plimsoll", "fleets")),
    Part("loads that nothing was tuned for", _UNSEEN, ("plimsoll", "fleets")),
    Part("peers elsewhere", (*_STEPS[1:], "ramp-120", *_PAIRS), ("fleets", "peers", "found")),
    Part("followers on traces", _TRACES, ("followers",)),
    Part("the other constant rates", _CONSTANT, ("plimsoll", "fleets")),
    Part("three seeds", _KNOWN, ("plimsoll", "fleets"), seeds=3),
    Part("the price of a miss", _PRICED, _PRICES),
    Part("leading followers, three seeds", (*_FOLLOWED, *_PAIRS), ("followers",), seeds=3),
    Part("peers on traces", _TRACES, ("peers",)),
    Part("the step, ten seeds", _STEPS, ("plimsoll", "fleets"), seeds=10),
    Part("pairs on other machines", _PAIRS, ("plimsoll", "followers"), plants=OTHERS),
    Part("clients that come back, on other machines", _RETURNING, ("plimsoll",), plants=OTHERS),
    Part("rows of which nothing is asked", ("mooncake", "ragpulse-week"), ("plimsoll", "fleets")),
    Part("schedules that know the future, on traces", _TRACES, ("schedules",)),
    Part("half a day", _HALF_DAY, ("plimsoll", "fleets", "followers", "peers", "schedules")),
    Part("half a day on other machines", _HALF_DAY, ("plimsoll", "followers"), plants=OTHERS),
    Part("traces on other machines", _TRACES, ("plimsoll", "followers"), plants=OTHERS),
    Part("each constant rate once, on other machines", _CONSTANT_FIRST, ("plimsoll", "fleets"), plants=OTHERS),
)
