"""Shares of one replica's slots among several gateways.

Problem: if each gateway uses the whole cap, a replica is overloaded. If each has a fixed half, one gateway rejects
while the other has free slots. While shares change, or a gateway fails, their sum must never exceed the cap.

Idea: allocate whole slots. Targets follow demand and are rounded by largest remainder, so that they sum to the cap. A
slot moves only after its holder confirms that it no longer uses it (shrink before grow). So granted and free slots
always sum to the cap. A gateway may exceed its share only at a replica that is measurably faster than the cost model,
in the same proportion (see `replica`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping


def split_by_demand(cap: int, demand: Mapping[str, float]) -> dict[str, int]:
    """Returns integer shares of the cap in proportion to demand (largest remainder; ties by name).

    NaN and negative demand count as zero, infinity as the largest finite demand. Without any demand, shares are equal.
    If the cap suffices, each share is at least 1, so that an idle gateway can admit its first request. Raises
    ValueError for a negative cap.
    """
    if cap < 0:
        raise ValueError(f"cap must be at least 0, not {cap}")
    names = sorted(demand)
    if not names:
        return {}
    weights = _normalized_weights([demand[name] for name in names])
    min_share = 1 if cap >= len(names) else 0
    remaining = cap - min_share * len(names)
    exact = [remaining * weight for weight in weights]
    shares = [math.floor(value) for value in exact]
    order = sorted(range(len(names)), key=lambda i: (shares[i] - exact[i], i))
    for i in order[: remaining - sum(shares)]:
        shares[i] += 1
    return {name: min_share + share for name, share in zip(names, shares, strict=True)}


def _normalized_weights(demand: list[float]) -> list[float]:
    finite = [value if value > 0 else 0.0 for value in demand]  # NaN compares false
    max_demand = max((value for value in finite if value < math.inf), default=0.0) or 1.0
    scaled = [min(value / max_demand, 1.0) for value in finite]
    total = math.fsum(scaled)
    if total <= 0:
        return [1.0 / len(demand)] * len(demand)
    return [value / total for value in scaled]


class ShareAllocator:
    """Allocates one replica's slots to gateways. A gateway may use its grant and should converge to its target."""

    def __init__(self, cap: int) -> None:
        if cap < 0:
            raise ValueError(f"cap must be at least 0, not {cap}")
        self._granted: dict[str, int] = {}
        self._target: dict[str, int] = {}
        self._free_slots = cap
        self._reclaim_slots = 0  # slots to reclaim after the cap shrank

    @property
    def granted(self) -> dict[str, int]:
        """The granted slots of each gateway."""
        return dict(self._granted)

    @property
    def total_slots(self) -> int:
        """The cap in force. A smaller cap takes effect only when its slots are released."""
        return self._free_slots + sum(self._granted.values())

    def rebalance(self, cap: int, demand: Mapping[str, float]) -> dict[str, int]:
        """Set new targets by demand. Returns the grants.

        Free slots go to gateways below their target at once. Other slots move after `confirm`. A gateway that is not in
        `demand` counts as gone, because its streams ended with it. Raises ValueError for a negative cap.
        """
        self._target = split_by_demand(cap, demand)
        for gateway in [gateway for gateway in self._granted if gateway not in self._target]:
            self._free_slots += self._granted.pop(gateway)
        for gateway in self._target:
            self._granted.setdefault(gateway, 0)
        total = self.total_slots
        self._reclaim_slots = max(0, total - cap)
        self._free_slots += max(0, cap - total)
        return self._grant_free()

    def limit(self, gateway: str) -> int:
        """Returns the slots that the gateway may use: the lower of grant and target, 0 if unknown."""
        return min(self._granted.get(gateway, 0), self._target.get(gateway, 0))

    def confirm(self, gateway: str, in_use: int) -> dict[str, int]:
        """Release the gateway's slots above both `in_use` and its target. Returns the grants.

        The gateway confirms that it uses at most `in_use` slots and respects its limit. Ignores an unknown gateway.
        """
        granted = self._granted.get(gateway)
        if granted is None:
            return self.granted
        retained = min(granted, max(in_use, self._target[gateway]))
        self._granted[gateway] = retained
        self._free_slots += granted - retained
        return self._grant_free()

    def _grant_free(self) -> dict[str, int]:
        """Use free slots to shrink to the cap first, then for the gateways furthest below their target."""
        reclaimed = min(self._free_slots, self._reclaim_slots)
        self._free_slots -= reclaimed
        self._reclaim_slots -= reclaimed
        below = sorted(self._target, key=lambda name: (self._granted[name] - self._target[name], name))
        for name in below:
            slots = min(self._free_slots, max(0, self._target[name] - self._granted[name]))
            self._granted[name] += slots
            self._free_slots -= slots
        return self.granted
