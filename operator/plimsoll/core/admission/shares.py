"""One cap, several gateways: who may use how much of it, at every moment.

Problem: if two gateways each know the whole cap, a replica is filled twice over; if each has a fixed half, one refuses
while the other has room; and while shares change, the sum must not be exceeded for a moment, nor when one dies.

Idea: a ledger of whole units. Targets follow demand, rounded by largest remainder so that they sum to the cap. A unit
moves only when the gateway that has it says that it uses it no more (shrink before grow), and in the ledger it moves in
one step: what the ledger grants always sums to the whole. A gateway keeps to it, but where a replica has proven faster
than the model the units were made by: there it may have more in the same proportion (`replica`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping


def split(cap: int, demand: Mapping[str, float]) -> dict[str, int]:
    """The cap in whole shares by demand (largest remainder; ties by name), which sum to it.

    NaN and negative demand count as none, infinity as the greatest finite; with none at all shares are equal. Where the
    cap suffices each has at least 1, so that a gateway that was idle can let its first request in. An empty mapping
    gives an empty one. Raises ValueError for a negative cap.
    """
    if cap < 0:
        raise ValueError(f"cap must be at least 0, not {cap}")
    names = sorted(demand)
    if not names:
        return {}
    weights = _weights([demand[name] for name in names])
    least = 1 if cap >= len(names) else 0
    rest = cap - least * len(names)
    exact = [rest * weight for weight in weights]
    shares = [math.floor(value) for value in exact]
    order = sorted(range(len(names)), key=lambda i: (shares[i] - exact[i], i))
    for i in order[: rest - sum(shares)]:
        shares[i] += 1
    return {name: least + share for name, share in zip(names, shares, strict=True)}


def _weights(demand: list[float]) -> list[float]:
    known = [value if value > 0 else 0.0 for value in demand]  # NaN compares false
    top = max((value for value in known if value < math.inf), default=0.0) or 1.0
    scaled = [min(value / top, 1.0) for value in known]
    total = math.fsum(scaled)
    if total <= 0:
        return [1.0 / len(demand)] * len(demand)
    return [value / total for value in scaled]


class Ledger:
    """The units of one replica's cap among gateways. `granted` is what each may use, `target` what it should have."""

    def __init__(self, cap: int) -> None:
        if cap < 0:
            raise ValueError(f"cap must be at least 0, not {cap}")
        self._granted: dict[str, int] = {}
        self._target: dict[str, int] = {}
        self._free = cap
        self._debt = 0  # units to be taken back since the cap has shrunk

    @property
    def granted(self) -> dict[str, int]:
        """Units of each gateway."""
        return dict(self._granted)

    @property
    def free(self) -> int:
        """Units of nobody; 0 while there is a gateway whose target is not reached."""
        return self._free

    @property
    def whole(self) -> int:
        """The cap that is in force: a smaller one is so only when the units are given back."""
        return self._free + sum(self._granted.values())

    def resplit(self, cap: int, demand: Mapping[str, float]) -> dict[str, int]:
        """New targets, and the grants at once: what is free goes to those below their target; the rest must be
        confirmed away first. A gateway that is not in `demand` is taken as gone: its streams ended with it.

        Raises ValueError for a negative cap.
        """
        self._target = split(cap, demand)
        for name in [name for name in self._granted if name not in self._target]:
            self._free += self._granted.pop(name)
        for name in self._target:
            self._granted.setdefault(name, 0)
        whole = self.whole
        self._debt = max(0, whole - cap)
        self._free += max(0, cap - whole)
        return self._hand_out()

    def limit(self, gateway: str) -> int:
        """What the gateway should let itself have from now on: the lesser of grant and target; 0 if unknown."""
        return min(self._granted.get(gateway, 0), self._target.get(gateway, 0))

    def confirm(self, gateway: str, in_use: int) -> dict[str, int]:
        """The gateway now uses at most `in_use` units and keeps to its limit: units above both are free.

        Returns the grants. An unknown gateway changes nothing.
        """
        granted = self._granted.get(gateway)
        if granted is None:
            return self.granted
        kept = min(granted, max(in_use, self._target[gateway]))
        self._granted[gateway] = kept
        self._free += granted - kept
        return self._hand_out()

    def gone(self, gateway: str) -> dict[str, int]:
        """The gateway and its streams are no more: its units go to the others."""
        self._free += self._granted.pop(gateway, 0)
        self._target.pop(gateway, None)
        if self._target:
            cap = self.whole - self._debt
            self._target = split(cap, {name: float(units) for name, units in self._target.items()})
        return self._hand_out()

    def _hand_out(self) -> dict[str, int]:
        """Free units pay the debt first, then go to those below their target, the furthest below first."""
        paid = min(self._free, self._debt)
        self._free -= paid
        self._debt -= paid
        below = sorted(self._target, key=lambda name: (self._granted[name] - self._target[name], name))
        for name in below:
            units = min(self._free, max(0, self._target[name] - self._granted[name]))
            self._granted[name] += units
            self._free -= units
        return self.granted
