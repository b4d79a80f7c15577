"""The plant: engines, start-ups and network of the simulated fleet. The controller never sees it.

A replica's speed is drawn at its start, within `spread` of the profile; `scale` multiplies the times of all steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final

from plimsoll.api.contract import engine_contract
from plimsoll.core.ports import EngineInfo, SelfBenchmark
from plimsoll.core.types import Role
from plimsoll.sim.engine.engine_metrics import EngineMetrics
from plimsoll.sim.engine.kv_cache import KvCache
from plimsoll.sim.engine.kv_link import FABRIC_BYTES_PER_S, KvLink
from plimsoll.sim.engine.simulated_engine import SimulatedEngine
from plimsoll.sim.engine.step_timing import StepTiming
from plimsoll.sim.profile import HardwareProfile
from plimsoll.sim.startup import StartupDistribution
from plimsoll.sim.step_noise import draw_step_noise

_BENCHMARK_POINTS: Final = (
    (16, 128, 1024),
    (1, 4, 8),
    16,
)  # a warm-up's prompt lengths, batch sizes and tokens of each
_VERSION: Final = "simulated"


@dataclass(frozen=True)
class Plant:
    """The hardware of a fleet. profile: of an engine of any tier that tier_profiles does not name.

    noise: relative standard deviation of a step. hash_block_tokens: tokens of a hashed block of the trace, 0 without.
    remote_prefill_http_s: HTTP time of a remote prefill. config: the model's config.json, which engines report, None if
    they do not find it. gpus: of a replica. bytes_per_s: of the fabric between engines. fast_forward: see
    `SimulatedEngine`. max_adapters: LoRA adapters of a step (`--max-loras`), 0 without LoRA. adapter_load_s: time by
    which the copy of an adapter to the GPU delays a step; assumed, not measured.
    """

    profile: HardwareProfile
    startup: StartupDistribution
    scale: float = 1.0
    spread: float = 0.1
    noise: float = 0.02
    hash_block_tokens: int = 0
    remote_prefill_http_s: float = 0.002
    config: Mapping[str, Any] | None = None
    gpus: Mapping[Role, int] = field(default_factory=dict)
    bytes_per_s: float = FABRIC_BYTES_PER_S
    fast_forward: bool = True
    tier_profiles: Mapping[Role, HardwareProfile] = field(default_factory=dict)
    max_adapters: int = 0
    adapter_load_s: float = 0.03

    def profile_for(self, role: Role) -> HardwareProfile:
        """Profile of a tier's engines."""
        profile = self.tier_profiles.get(role, self.profile)
        factors = {Role.PREFILL: profile.producer_factor, Role.DECODE: profile.consumer_factor}
        return profile.scaled(self.scale * factors.get(role, 1.0))

    def engine(self, role: Role, random: Random) -> SimulatedEngine:
        """Engine of a new replica."""
        engine_profile = self.profile_for(role).scaled(1.0 + self.spread * random.uniform(-1.0, 1.0))
        return SimulatedEngine(
            engine_profile.max_num_seqs,
            engine_profile.budget,
            KvCache(
                engine_profile.kv_tokens // engine_profile.block_size, engine_profile.block_size, self.hash_block_tokens
            ),
            StepTiming(engine_profile, draw_step_noise(self.noise, random)),
            self.kv_link(),
            EngineMetrics(engine_profile.max_model_len),
            self.fast_forward,
            max_adapters=self.max_adapters,
            adapter_load_s=self.adapter_load_s,
        )

    def kv_link(self) -> KvLink:
        """Cost of KV reads for a decode engine."""
        profile = self.profile
        return KvLink(profile.layers, profile.block_size, profile.kv_bytes_per_token, self.bytes_per_s)

    @property
    def max_sequence_tokens(self) -> int:
        """Tokens of the longest sequence that an engine accepts."""
        return min(
            self.profile.max_model_len, self.profile.kv_tokens // self.profile.block_size * self.profile.block_size
        )

    def frontend_s(self, tokens: int) -> float:
        """Time of a request on its way to the engine core."""
        return self.profile.frontend + self.profile.frontend_token * tokens

    def engine_info(self, role: Role) -> EngineInfo:
        """What an engine reports about itself, including the self-benchmark of its warm-up."""
        profile = self.tier_profiles.get(role, self.profile)
        return EngineInfo(
            engine=_VERSION,
            engine_version=_VERSION,
            accelerator=profile.accelerator,
            gpus=self.gpus.get(role, 1),
            max_sequences=profile.max_num_seqs,
            kv_tokens=profile.kv_tokens - profile.kv_tokens % profile.block_size,
            token_budget=profile.budget,
            block_tokens=profile.block_size,
            max_model_len=profile.max_model_len,
            config=self.config,
            self_benchmark=self._self_benchmark(role),
        )

    def _self_benchmark(self, role: Role) -> SelfBenchmark:
        """What the warm-up of an undisturbed, cool engine measures, HTTP included."""
        c = self.profile_for(role).coefficients
        lengths, sizes, outputs = _BENCHMARK_POINTS
        prefill = tuple(
            (n, self.frontend_s(n) + c.base + c.anypre + c.pretok * n + c.preattn * n * n / 2) for n in lengths
        )
        batches = [(size, min(lengths) + outputs // 2) for size in sizes]
        batches.append((max(sizes), max(lengths) + outputs // 2))
        decode = tuple((size, context, c.base + c.dec * size + c.ctx * size * context) for size, context in batches)
        return SelfBenchmark(prefill, () if role is Role.PREFILL else decode)


def min_drain_s() -> float:
    """Minimum time that a terminating engine waits, seconds."""
    drain = engine_contract().drain
    return float(drain["min_handover_seconds"] + drain["quiet_seconds"])
