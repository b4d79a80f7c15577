"""An engine core in virtual time, small enough to count by hand, and sequences for it."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, replace

from plimsoll.sim.engine.kv_link import KvLink
from plimsoll.sim.profiles import HardwareProfile, StepCoefficients
from simulated import token_text
from simulated.engine_core import EngineCore
from simulated.kv_leases import LeaseTable
from simulated.sequence import ServedSequence
from simulated.served_metrics import ServedMetrics

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
    meters: ServedMetrics
    updates: list[tuple[float | None, str, int]] = field(default_factory=list)

    def add(
        self, at: float, prompt: int = 4, tokens: int = 3, start: int | None = None, **more: object
    ) -> ServedSequence:
        """A sequence of so many prompt tokens, all alike (`start` says which) or unlike those of any other."""
        serial = next(_names)
        first = serial * 1_000_000 if start is None else start
        sequence = ServedSequence(
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
        """Lets everything happen up to a time, looking after each step; returns the last event's time."""
        now = 0.0
        while (moment := self._next_moment_s(now)) <= until and moment < math.inf:
            now = moment
            self.core.advance(now)
            for sequence in sorted(self.core.updated, key=lambda one: one.request_id):
                sequence.on_update()
            self.core.updated.clear()
        return now

    def _next_moment_s(self, now: float) -> float:
        """The end of the step that runs, or an event of the core."""
        event_s = self.core.next_event_s()
        step_s = self.core.step_end_s(now) if now else event_s
        return min(step_s, event_s) if step_s > now else event_s


def make_core(
    made: HardwareProfile | None = None,
    blocks: int | None = None,
    caching: bool = True,
    lease_s: float = 30.0,
    rate: float = 1e6,
) -> CoreHarness:
    """A core of a profile with so many KV blocks."""
    one = made or make_profile()
    if blocks is not None:
        one = replace(one, kv_tokens=blocks * one.block_size)
    meters = ServedMetrics(one.max_model_len, has_kv_connector=True)
    wire = KvLink(one.layers, one.block_size, one.kv_bytes_per_token, rate)
    core = EngineCore(one, wire, LeaseTable(lease_s), meters, prefix_caching=caching)
    return CoreHarness(core, meters)
