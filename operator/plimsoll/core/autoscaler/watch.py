"""What a tick keeps of a service so as not to find it out again: nothing here is knowledge, all of it can be made anew.

Problem: most of what a tick looks at is what the last tick looked at.

Idea: answers are kept beside what they were made from, and hold while that is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from plimsoll.core.autoscaler.tier import Tier
from plimsoll.core.forecast import Unknown
from plimsoll.core.forecast.outlook import Chances
from plimsoll.core.ports import About
from plimsoll.core.scaling import Line, Policy
from plimsoll.core.scaling.quiet import allows


@dataclass(slots=True)
class Kept:
    """Of one tier. line: as it was at the last decision."""

    line: Line | Unknown | None = None
    about: About | None = None
    basis: tuple[tuple[object, ...], tuple[object, ...]] = ((), ())
    chances: Chances = field(default_factory=Chances)


@dataclass(slots=True)
class Watch:
    """Of one service. tiers: by name. policy: of the last decision."""

    tiers: dict[str, Kept] = field(default_factory=dict)
    policy: Policy | None = None
    _allowed: bool = False
    _rests_since: object = None
    _rests: Mapping[str, int] | None = None

    def of(self, tier: str) -> Kept:
        """What is kept of a tier."""
        found = self.tiers.get(tier)
        if found is None:
            found = self.tiers[tier] = Kept()
        return found

    def news(self, tier: str, about: About) -> bool:
        """Whether the engine says something else than before."""
        return self.of(tier).about is not about

    def met(self, tier: str, about: About) -> None:
        """What the engine says has been taken in."""
        self.of(tier).about = about

    def moved(self, tier: str, tiers: Sequence[Tier], same: tuple[object, ...], equal: tuple[object, ...]) -> bool:
        """Whether anything that a tier's line is made from is another than at the last look.

        same: what must be the very same object, beside the speeds and limits of all tiers. equal: what must be equal.
        """
        kept = self.of(tier)
        same += tuple(part for one in tiers for part in (one.posterior, one.at, one.limits))
        before, kept.basis = kept.basis, (same, equal)
        if before[1] != equal or len(before[0]) != len(same):
            return True
        return any(old is not new for old, new in zip(before[0], same, strict=True))

    def decided(self, policy: Policy, lines: Mapping[str, Line | Unknown]) -> None:
        """A decision has been made with this."""
        if policy is not self.policy:
            self.policy, self._allowed = policy, allows(policy)
        for name, line in lines.items():
            self.of(name).line = line

    def rests(self, since: object, find: Callable[[], Mapping[str, int] | None]) -> Mapping[str, int] | None:
        """What `find` finds, asked once for each `since`, the very same object: the counts at which tiers rest."""
        if since is not self._rests_since:
            self._rests_since, self._rests = since, find()
        return self._rests

    def is_quiet_under(self, policy: Policy) -> bool:
        """Whether the policy is that of the last decision, and one under which a service can be quiet."""
        if policy is not self.policy:
            if policy != self.policy:
                return False
            self.policy = policy
        return self._allowed
