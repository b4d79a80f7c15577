"""An engine core in virtual time, small enough to count by hand, and sequences for it."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

from plimsoll.sim.profiles import Coefficients, Profile
from simulated import words
from simulated.core import Core
from simulated.meters import Meters
from simulated.plant import Plant
from simulated.scheduler import Limits
from simulated.sequences import Sequence
from simulated.transfer import Leases, Wire

PLAIN = Coefficients(base=1.0, anypre=0.0, pretok=0.0, preattn=0.0, dec=0.0, ctx=0.0)
HOT = Coefficients(4.74166e-3, -1.30016e-3, 2.26495e-5, 1.03542e-9, 1.8158e-5, 3.04844e-8)
_names = itertools.count()


def profile(coefficients: Coefficients = PLAIN, **more: float) -> Profile:
    """A profile; steps of one second unless told otherwise."""
    numbers = {
        "kv_tokens": 4096,
        "max_num_seqs": 8,
        "budget": 64,
        "block_size": 4,
        "layers": 2,
        "max_model_len": 4096,
        "kv_bytes_per_token": 1000,
        **more,
    }
    return Profile(coefficients=coefficients, **numbers)  # type: ignore[arg-type]


@dataclass
class Engine:
    """A core, and a log of what its sequences said: (time, name, tokens so far)."""

    core: Core
    meters: Meters
    said: list[tuple[float, str, int]] = field(default_factory=list)

    def add(self, at: float, prompt: int = 4, tokens: int = 3, start: int | None = None, **more: object) -> Sequence:
        """A sequence of so many prompt tokens, all alike (`start` says which) or unlike those of any other."""
        serial = next(_names)
        first = serial * 1_000_000 if start is None else start
        sequence = Sequence(
            request_id=f"r{serial}",
            prompt=words.from_ids(range(first, first + prompt)),
            max_tokens=tokens,
            arrived_s=at,
            streamed=True,
            **more,  # type: ignore[arg-type]
        )
        sequence.heard = lambda: self.said.append((sequence.last_s, sequence.request_id, sequence.emitted))
        self.core.add(sequence, at)
        return sequence

    def run(self, until: float = math.inf) -> float:
        """Lets everything happen up to a time, or all there is; returns the last event's time."""
        now = 0.0
        while (moment := self.core.next_s()) <= until and moment < math.inf:
            now = moment
            self.core.advance(now)
            for sequence in sorted(self.core.touched, key=lambda one: one.request_id):
                sequence.heard()
            self.core.touched.clear()
        return now


def engine(
    made: Profile | None = None,
    blocks: int | None = None,
    caching: bool = True,
    lease_s: float = 30.0,
    rate: float = 1e6,
) -> Engine:
    """A core of a profile with so many KV blocks."""
    one = made or profile()
    meters = Meters(one.max_model_len, connector=True)
    core = Core(
        Limits(one.max_num_seqs, one.budget, one.block_size, caching),
        one.kv_tokens // one.block_size if blocks is None else blocks,
        Plant(one),
        Wire(one.layers, one.block_size, one.kv_bytes_per_token, rate),
        Leases(lease_s),
        meters,
    )
    return Engine(core, meters)
