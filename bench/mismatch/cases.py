"""The mismatches: a constant load, an SLO, and engines that differ from the model in one respect each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from bench.scoreboard.loads import LengthDistribution, RenewalLoad
from plimsoll.core.planning.known_models import KNOWN_CONFIGS
from plimsoll.sim import profile, startup
from plimsoll.sim.attempt import TraceRequest
from plimsoll.sim.profile import HardwareProfile

LENGTH_S: Final = 1800.0
STARTUP: Final = "60"
_CHAT: Final = LengthDistribution(2048.0, 256.0)


@dataclass(frozen=True)
class TwoLengths:
    """Prompts of two lengths; `share` of them have the second. output: mean tokens out, lognormal."""

    first: int
    second: int
    share: float
    output: float

    def draw(self, rng: np.random.Generator, requests: int) -> list[tuple[int, int]]:
        outputs = [tokens for _, tokens in LengthDistribution(1.0, self.output).draw(rng, requests)]
        chosen = np.where(rng.random(requests) < self.share, self.second, self.first)
        return [(int(prompt), tokens) for prompt, tokens in zip(chosen, outputs, strict=True)]


@dataclass(frozen=True)
class MismatchCase:
    """One mismatch. rate: requests/s. plant: fields of `MismatchedPlant` beyond profile and start-up."""

    name: str
    description: str
    rate: float = 24.0
    lengths: Any = _CHAT  # draws tokens in and out, as `LengthDistribution` does
    ttft: str = "1s"
    tpot: str = "40ms"
    hardware: str = "h200-8b-hot"
    model: str = "Qwen3-8B"
    tiers: tuple[str, ...] = ("serve",)
    gpus: int = 1
    max_replicas: int = 10
    change: Callable[[HardwareProfile], HardwareProfile] | None = None  # of what engines announce into what they are
    plant: dict[str, Any] = field(default_factory=dict)
    sends_max_tokens: bool = True

    def requests(self, seed: int) -> list[TraceRequest]:
        """Poisson arrivals of this seed, in order of time."""
        return RenewalLoad(self.rate, 1.0, LENGTH_S, self.lengths).make(seed)

    def manifest(self) -> dict[str, Any]:
        tiers = {name: {"minReplicas": 1, "maxReplicas": self.max_replicas, "gpus": self.gpus} for name in self.tiers}
        slo = {"percentile": 95, "ttft": self.ttft, "tpot": self.tpot}
        return {
            "apiVersion": "plimsoll.dev/v1alpha1",
            "kind": "InferenceService",
            "metadata": {"name": "mismatch", "namespace": "default"},
            "spec": {"model": {"uri": f"hf://Qwen/{self.model}"}, "slo": slo, "tiers": tiers},
        }

    def plant_fields(self) -> dict[str, Any]:
        """The fields of the case's `MismatchedPlant`."""
        announced = profile.load(self.hardware)
        if len(self.tiers) > 1:
            announced = replace(announced, block_size=128)  # what the operator starts prefill and decode engines with
        return {
            "profile": announced if self.change is None else self.change(announced),
            "announced": announced,
            "startup": startup.parse(STARTUP),
            "config": KNOWN_CONFIGS[self.model],
            **self.plant,
        }


def _cases() -> list[MismatchCase]:
    guide: dict[str, Any] = {
        "lengths": LengthDistribution(4000.0, 1000.0),
        "ttft": "3s",
        "tpot": "100ms",
        "hardware": "h100x2-32b",
        "model": "Qwen3-32B",
        "gpus": 2,
        "rate": 4.0,
    }
    return [
        MismatchCase("none", "the engines are as announced"),
        MismatchCase("host-107ms", "the host adds 107 ms to each first token", ttft="250ms", plant={"host_s": 0.107}),
        MismatchCase("host-350ms", "the host adds 350 ms to each first token", ttft="500ms", plant={"host_s": 0.35}),
        MismatchCase(
            "host-load",
            "the host adds 2 ms to each first token for each sequence that an engine runs",
            ttft="400ms",
            plant={"host_s_per_sequence": 0.002},
        ),
        MismatchCase(
            "host-quiet",
            "the host adds 107 ms to each first token, and replicas are not full: nothing is rejected",
            rate=10.0,
            lengths=LengthDistribution(1200.0, 220.0, 0.55),
            ttft="200ms",
            tpot="50ms",
            plant={"host_s": 0.107},
        ),
        MismatchCase("fast", "steps take 0.7 times as long", plant={"scale": 0.7}),
        MismatchCase("slow", "steps take 1.4 times as long", plant={"scale": 1.4}),
        MismatchCase("one-slow", "every fourth engine takes twice as long", plant={"pace": _every_fourth}),
        MismatchCase("half-kv", "half of the announced KV cache", change=_half_kv, **guide),
        MismatchCase("few-slots", "32 sequences at once instead of the announced 256", change=_few_slots),
        MismatchCase(
            "few-slots-pd",
            "prefill and decode engines, 32 sequences at once instead of the announced 256",
            tiers=("prefill", "decode"),
            change=_few_slots,
        ),
        MismatchCase("sigma", "lengths with a sigma of 1.2", lengths=LengthDistribution(2048.0, 256.0, 1.2)),
        MismatchCase(
            "two-prompts",
            "prompts of 500 tokens, and a fifth of 16,000",
            rate=12.0,
            lengths=TwoLengths(500, 16000, 0.2, 256.0),
            ttft="2s",
        ),
        MismatchCase("no-max-tokens", "clients state no max_tokens", sends_max_tokens=False),
        MismatchCase(
            "slow-fabric",
            "prefill and decode engines, a fabric of a tenth of the usual speed",
            tiers=("prefill", "decode"),
            plant={"bytes_per_s": 1e10},
        ),
    ]


def _every_fourth(n: int) -> float:
    return 2.0 if n % 4 == 3 else 1.0


def _half_kv(announced: HardwareProfile) -> HardwareProfile:
    return replace(announced, kv_tokens=announced.kv_tokens // 2)


def _few_slots(announced: HardwareProfile) -> HardwareProfile:
    return replace(announced, max_num_seqs=32)


CASES: Final = {case.name: case for case in _cases()}
