"""An engine core in virtual time, small enough to count by hand, and sequences for it."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

from plimsoll.sim.profiles import HardwareProfile, StepCoefficients
from simulated import token_text
from simulated.engine_core import EngineCore
from simulated.engine_metrics import EngineMetrics
from simulated.kv_transfer import KvLink, LeaseTable
from simulated.plant import StepTimePlant
from simulated.scheduler import StepLimits
from simulated.sequence import EngineSequence

UNIT_STEPS = StepCoefficients(base=1.0, anypre=0.0, pretok=0.0, preattn=0.0, dec=0.0, ctx=0.0)
FITTED_STEPS = StepCoefficients(4.74166e-3, -1.30016e-3, 2.26495e-5, 1.03542e-9, 1.8158e-5, 3.04844e-8)
_names = itertools.count()


def make_profile(coefficients: StepCoefficients = UNIT_STEPS, **more: float) -> HardwareProfile:
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
    return HardwareProfile(coefficients=coefficients, **numbers)  # type: ignore[arg-type]


@dataclass
class CoreHarness:
    """A core, and a log of what its sequences said: (time, name, tokens so far)."""

    core: EngineCore
    meters: EngineMetrics
    updates: list[tuple[float, str, int]] = field(default_factory=list)

    def add(
        self, at: float, prompt: int = 4, tokens: int = 3, start: int | None = None, **more: object
    ) -> EngineSequence:
        """A sequence of so many prompt tokens, all alike (`start` says which) or unlike those of any other."""
        serial = next(_names)
        first = serial * 1_000_000 if start is None else start
        sequence = EngineSequence(
            request_id=f"r{serial}",
            prompt=token_text.encode_ids(range(first, first + prompt)),
            max_tokens=tokens,
            arrived_s=at,
            streamed=True,
            **more,  # type: ignore[arg-type]
        )
        sequence.on_update = lambda: self.updates.append(
            (sequence.last_token_s, sequence.request_id, sequence.emitted_tokens)
        )
        self.core.add(sequence, at)
        return sequence

    def run(self, until: float = math.inf) -> float:
        """Lets everything happen up to a time, or all there is; returns the last event's time."""
        now = 0.0
        while (moment := self.core.next_event_s()) <= until and moment < math.inf:
            now = moment
            self.core.advance(now)
            for sequence in sorted(self.core.updated, key=lambda one: one.request_id):
                sequence.on_update()
            self.core.updated.clear()
        return now


def make_core(
    made: HardwareProfile | None = None,
    blocks: int | None = None,
    caching: bool = True,
    lease_s: float = 30.0,
    rate: float = 1e6,
) -> CoreHarness:
    """A core of a profile with so many KV blocks."""
    one = made or make_profile()
    meters = EngineMetrics(one.max_model_len, has_kv_connector=True)
    core = EngineCore(
        StepLimits(one.max_num_seqs, one.budget, one.block_size, caching),
        one.kv_tokens // one.block_size if blocks is None else blocks,
        StepTimePlant(one),
        KvLink(one.layers, one.block_size, one.kv_bytes_per_token, rate),
        LeaseTable(lease_s),
        meters,
    )
    return CoreHarness(core, meters)
