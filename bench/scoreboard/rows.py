"""The rows of the scoreboard: load, SLO, machine and target figures of each.

A row is data: a load, an SLO, replica bounds, a machine with its start-up times, and targets. The targets come from
figures of other systems, which `docs/evaluation/scoreboard.md` cites. Each row also runs on plants whose steps take 0.7
and 1.4 times as long. There the row is compared with reactive baselines on the same plant, not with absolute figures.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Final

from bench.scoreboard.loads import LengthDistribution, LoadGenerator, PhasedLoad, RatePhase, RenewalLoad, SineLoad
from bench.scoreboard.trace_slices import TraceSlice

PLANTS: Final = (1.0, 0.7, 1.4)  # seconds of a step over the nominal ones
OTHER_PLANTS: Final = PLANTS[1:]


@dataclass(frozen=True)
class RowTargets:
    """Targets of a row for Plimsoll, as means over the seeds; None: no target.

    offered, admitted: lowest attainment. gpu_hours, mean_replicas: highest. max_attainment_gap: attainment by which the
    best reactive baseline at `comparison_cost_share` times Plimsoll's GPU-hours may be better. max_cost_ratio: highest
    GPU-hours over those of the cheapest policy without knowledge of the future that attains as much. windows: lowest
    share of passed windows. reversals: most in a phase. max_extra_replicas: most replicas, in the mean after the first
    hour, above the smallest constant fleet that meets the SLO. honoured_retry_after: lowest share of the retry
    reservations of up to 60 s whose requests are admitted at their first retry, and of those of 60 to 120 s by their
    second.
    """

    offered: float | None = None
    admitted: float | None = None
    gpu_hours: float | None = None
    mean_replicas: float | None = None
    max_attainment_gap: float | None = None
    comparison_cost_share: float = 1.0
    max_cost_ratio: float | None = None
    windows: float | None = None
    reversals: int | None = None
    max_extra_replicas: float | None = None
    honoured_retry_after: float | None = None


@dataclass(frozen=True)
class BoardRow:
    """One row of the board. tiers: name in the manifest, fewest and most replicas of each. gpus: of a replica.

    initial: ready replicas, in the order of the tiers. startup: as `listed_starts.parse` takes it. hardware: as
    `plimsoll simulate` takes it. seeds: number of seeds in a mean. spec_overrides: further fields of the manifest's
    spec.
    """

    name: str
    description: str
    load: LoadGenerator
    ttft: str
    tpot: str
    tiers: tuple[tuple[str, int, int], ...]
    initial: tuple[int, ...]
    startup: str
    hardware: str
    targets: RowTargets
    gpus: int = 1
    seeds: int = 5
    spec_overrides: tuple[tuple[str, Any], ...] = ()
    ttft_per_k_token: str | None = None
    percentile: int = 95
    clients: str = "none"

    @property
    def compares_windows(self) -> bool:
        """Whether who does as well is judged by the windows that pass, not by attainment."""
        return self.targets.windows is not None or self.targets.max_extra_replicas is not None

    def manifest(self) -> dict[str, Any]:
        """The row's InferenceService."""
        slo = {"percentile": self.percentile, "ttft": self.ttft, "tpot": self.tpot}
        if self.ttft_per_k_token is not None:
            slo["ttftPerKToken"] = self.ttft_per_k_token
        tiers = {
            name: {"minReplicas": least, "maxReplicas": most, "gpus": self.gpus} for name, least, most in self.tiers
        }
        spec = {"model": {"uri": "hf://Qwen/Qwen3-8B"}, "slo": slo, "tiers": tiers, **dict(self.spec_overrides)}
        return {
            "apiVersion": "plimsoll.dev/v1alpha1",
            "kind": "InferenceService",
            "metadata": {"name": "board", "namespace": "default"},
            "spec": spec,
        }


_CHAT: Final = LengthDistribution(2048.0, 256.0)
_GUIDE: Final = LengthDistribution(4000.0, 1000.0, sigma=0.0)
_STEP: Final = PhasedLoad((RatePhase(300.0, 6.0, _CHAT), RatePhase(900.0, 36.0, _CHAT), RatePhase(600.0, 6.0, _CHAT)))
_RAMP: Final = SineLoad(5.0, 31.0, 1800.0, _CHAT)
_STAIRS: Final = PhasedLoad(tuple(RatePhase(360.0, rate, _GUIDE) for rate in (2.0, 4.0, 6.0, 8.0, 10.0, 4.0, 1.0)))
_LONG_PROMPTS, _LONG_OUTPUTS = LengthDistribution(4000.0, 100.0), LengthDistribution(300.0, 1000.0)
_SHIFT: Final = PhasedLoad(
    (
        RatePhase(600.0, 10.0, _LONG_PROMPTS),
        RatePhase(600.0, 20.0, _LONG_OUTPUTS),
        RatePhase(600.0, 10.0, _LONG_PROMPTS),
    )
)
_ONE_TIER: Final = (("serve", 1, 8),)
_TWO_TIERS: Final = (("prefill", 1, 4), ("decode", 1, 4))

_RATES: Final = (0.7, 1.3, 1.4, 2.0, 2.7, 2.85, 4.0, 5.5, 5.7, 8.0)

# Start-up time in seconds: attainment over offered, GPU-hours.
_STEPS: Final = {0: (0.985, 1.07), 30: (0.965, 1.27), 60: (0.95, 1.28), 120: (0.94, 1.30), 240: (0.91, 1.33)}


def _dynamo_rows() -> Iterable[BoardRow]:
    fixed: dict[str, Any] = {
        "ttft": "1s",
        "tpot": "40ms",
        "tiers": _ONE_TIER,
        "initial": (1,),
        "hardware": "h200-8b-hot",
    }
    for start_s, (offered, gpu_hours) in _STEPS.items():
        reach = RowTargets(offered, 0.99, gpu_hours, max_attainment_gap=0.01)
        says = f"6, 36 and 6 requests/s for 300, 900 and 600 s; engines start in {start_s} s"
        yield BoardRow(f"step-{start_s}", says, _STEP, startup=str(start_s), targets=reach, seeds=10, **fixed)
    says = "6, 36 and 6 requests/s for 300, 900 and 600 s; engines start in 10 s"
    reach = RowTargets(0.965, 0.99, 1.27)
    yield BoardRow("step-10", says, _STEP, startup="10", targets=reach, seeds=10, **fixed)
    says = "6 and 30 requests/s by turns of 300 and 600 s; engines start in 240 s, but the third and the fourth in 30 s"
    turns = PhasedLoad((RatePhase(300.0, 6.0, _CHAT), RatePhase(600.0, 30.0, _CHAT)) * 3)
    yield BoardRow(
        "starts-change", says, turns, startup="listed:240,240,240,30,30,240", targets=RowTargets(), seeds=3, **fixed
    )
    says = "5 + 31 sin(pi t / 1800 s) requests/s for 1,800 s; engines start in 120 s"
    yield BoardRow(
        "ramp-120",
        says,
        _RAMP,
        startup="120",
        targets=RowTargets(0.985, 0.99, 1.38, max_attainment_gap=0.02, comparison_cost_share=1 / 1.05),
        **fixed,
    )


def _disaggregated_rows() -> Iterable[BoardRow]:
    reach = RowTargets(0.96, 0.99, max_cost_ratio=1.10)
    fixed: dict[str, Any] = {"ttft": "1s", "tpot": "40ms", "tiers": _TWO_TIERS, "hardware": "h200-8b", "targets": reach}
    says = "the step on prefill and decode engines that start in 60 s"
    yield BoardRow("step-60-pd", says, _STEP, initial=(1, 1), startup="60", **fixed)
    says = "10 requests/s of 4,000/100 tokens, 20 of 300/1,000, 10 of 4,000/100, 600 s each; engines start in 60 s"
    yield BoardRow("shift-60-pd", says, _SHIFT, initial=(1, 1), startup="60", **fixed)


def _guide_rows() -> Iterable[BoardRow]:
    yield BoardRow(
        "guide",
        "2, 4, 6, 8, 10, 4 and 1 requests/s for 360 s each, 4,000/1,000 tokens; engines start in 100 to 135 s",
        _STAIRS,
        ttft="3s",
        tpot="100ms",
        tiers=(("serve", 3, 8),),
        initial=(3,),
        startup="uniform:100,135",
        hardware="h100x2-32b",
        gpus=2,
        targets=RowTargets(0.985, mean_replicas=5.25, max_attainment_gap=0.02, comparison_cost_share=1 / 1.05),
    )


def _constant_rows() -> Iterable[BoardRow]:
    reach = RowTargets(reversals=1, max_extra_replicas=0.2)
    lengths = LengthDistribution(4000.0, 1000.0)
    for rate in _RATES:
        for name, cv in (("poisson", 1.0), ("bursty", 2.0)):
            yield BoardRow(
                f"constant-{rate:g}-{name}",
                f"{rate:g} requests/s for six hours, gaps of CV {cv:g}, 4,000/1,000 tokens; engines start in 60 s",
                RenewalLoad(rate, cv, 6 * 3600.0, lengths),
                ttft="3s",
                tpot="100ms",
                tiers=(("serve", 1, 10),),
                initial=(1,),
                startup="60",
                hardware="h100x2-32b",
                gpus=2,
                targets=reach,
                seeds=1,
            )


def _at_raised_load(row: BoardRow) -> BoardRow:
    """The same service at 5 % more load: a fleet that keeps its promise there too is not just below its limit."""
    assert isinstance(row.load, RenewalLoad)
    return replace(row, name=f"{row.name}+5%", load=replace(row.load, rate=1.05 * row.load.rate))


def _trace_rows() -> Iterable[BoardRow]:
    """Ready at the start is what the first minute needs, about the least constant fleet that passes: with three engines
    for nine engines' load no policy could pass those windows.

    Of `mooncake` nothing is asked: its rate is constant, so that there is nothing to scale, and it is too short for 200
    windows. It shows shared beginnings, and prompts that the model does not hold.
    """
    reach = RowTargets(windows=0.99, max_cost_ratio=1.10)
    fixed: dict[str, Any] = {"targets": reach, "startup": "uniform:60,120", "seeds": 3}
    yield BoardRow(
        "azure-code",
        "Azure code 2023, 18 copies laid over each other: 46 requests/s; engines start in 60 to 120 s",
        TraceSlice("azure-code-2023.csv.gz", 3436.4, 18.0),
        ttft="500ms",
        tpot="40ms",
        ttft_per_k_token="150ms",
        tiers=(("serve", 1, 10),),
        initial=(9,),
        hardware="h200-8b-hot",
        **fixed,
    )
    yield BoardRow(
        "servegen-large",
        "ServeGen m-large, an hour of rising load, 2.7 copies: 28 requests/s on a 70B; engines start in 60 to 120 s",
        TraceSlice("servegen-m-large-hour.csv.gz", 3600.1, 2.7),
        ttft="2s",
        tpot="80ms",
        ttft_per_k_token="400ms",
        tiers=(("serve", 1, 12),),
        initial=(7,),
        hardware="h200-70b-capped",
        **fixed,
    )
    yield BoardRow(
        "servegen-r1",
        "ServeGen DeepSeek-R1, an evening hour, 3.1 copies: 28 requests/s, long answers; engines start in 60 to 120 s",
        TraceSlice("servegen-deepseek-r1-hour.csv.gz", 3600.0, 3.1),
        ttft="1s",
        tpot="40ms",
        ttft_per_k_token="200ms",
        tiers=(("serve", 1, 10),),
        initial=(4,),
        hardware="h200-8b-hot",
        **fixed,
    )
    yield BoardRow(
        "servegen-r1-half-day",
        "ServeGen DeepSeek-R1, noon to midnight: 1 to 6 requests/s, long answers, a 70B; engines start in 60 to 120 s",
        TraceSlice("servegen-deepseek-r1-half-day.csv.gz", 43_200.0),
        ttft="2s",
        tpot="80ms",
        ttft_per_k_token="400ms",
        tiers=(("serve", 1, 12),),
        initial=(7,),
        hardware="h200-70b",
        **fixed,
    )
    yield BoardRow(
        "mooncake",
        "Mooncake's synthetic trace with its shared beginnings, 8 copies; engines start in 60 to 120 s",
        TraceSlice("synthetic.csv.gz", 1030.0, 8.0, with_blocks=True),
        ttft="2s",
        tpot="40ms",
        ttft_per_k_token="200ms",
        tiers=(("serve", 1, 32),),
        initial=(28,),
        hardware="h200-8b-hot",
        **{**fixed, "targets": RowTargets()},
    )


def _sparse_rows() -> Iterable[BoardRow]:
    """From zero: a request that waited for an engine is late unless its class allows the start."""
    yield BoardRow(
        "ragpulse-week",
        "RAGPulse, a week of 7,106 requests from and to zero; engines start in 60 s",
        TraceSlice("ragpulse-week.csv.gz", 7 * 86_400.0),
        ttft="1s",
        tpot="50ms",
        ttft_per_k_token="100ms",
        tiers=(("serve", 0, 2),),
        initial=(0,),
        startup="60",
        hardware="h200-8b-hot",
        targets=RowTargets(),
        seeds=1,
        spec_overrides=(("admission", {"classes": [{"name": "default", "maxQueueTime": "2m"}]}),),
    )


def _retry_rows() -> Iterable[BoardRow]:
    load = PhasedLoad((RatePhase(300.0, 6.0, _CHAT), RatePhase(600.0, 20.0, _CHAT)))
    for clients in ("honour", "ignore", "mixed"):
        yield BoardRow(
            f"retry-{clients}",
            f"6, then 20 requests/s; engines start in 60 s; clients that were refused: {clients}",
            load,
            ttft="1s",
            tpot="40ms",
            tiers=(("serve", 1, 4),),
            initial=(1,),
            startup="60",
            hardware="h200-8b-hot",
            targets=RowTargets(honoured_retry_after=0.95),
            clients=clients,
        )


def _untuned_rows() -> Iterable[BoardRow]:
    """Loads that nothing was ever tuned for, and of which nothing is asked. One engine, or none, is there at first."""
    fixed: dict[str, Any] = {
        "ttft": "2s",
        "tpot": "60ms",
        "startup": "60",
        "hardware": "h200-70b",
        "targets": RowTargets(),
    }
    chat = LengthDistribution(2000.0, 250.0, sigma=0.6)
    one: dict[str, Any] = {**fixed, "tiers": (("serve", 1, 14),), "initial": (1,)}
    high, low = RatePhase(60.0, 8.0, chat), RatePhase(60.0, 1.0, chat)
    says = "8 and 1 requests/s by turns of 60 s on a 70B; engines start in 60 s"
    yield BoardRow("unseen-square", says, PhasedLoad((high, low) * 15), **one)
    says = "8 requests/s for 450 s, four times what one 70B carries, then 2; engines start in 60 s"
    yield BoardRow("unseen-flood", says, PhasedLoad((RatePhase(450.0, 8.0, chat), RatePhase(450.0, 2.0, chat))), **one)
    idle_s = (RatePhase(300.0, 3.3, chat), RatePhase(600.0, 0.0, chat))
    yield BoardRow(
        "unseen-naps-pd",
        "3.3 requests/s for 300 s of every 900, on a pair of 70B tiers from and to zero; engines start in 60 s",
        PhasedLoad(idle_s * 3),
        tiers=(("prefill", 0, 4), ("decode", 0, 4)),
        initial=(0, 0),
        spec_overrides=(("admission", {"classes": [{"name": "default", "maxQueueTime": "2m"}]}),),
        **fixed,
    )


def _held_out_rows() -> Iterable[BoardRow]:
    """Hours that were made for a measurement alone: nothing is tuned on them."""
    reach = RowTargets(windows=0.99)
    chat = LengthDistribution(1200.0, 220.0, sigma=0.9)
    swell = (14.0, 17.0, 15.0, 21.0, 26.0, 24.0, 31.0, 36.0, 30.0, 22.0, 25.0, 16.0)
    yield BoardRow(
        "held-out-chat",
        "14 to 36 requests/s of 1,200/220 tokens, an hour in steps of five minutes; engines start in 60 to 120 s",
        PhasedLoad(tuple(RatePhase(300.0, rate, chat) for rate in swell)),
        ttft="1s",
        tpot="40ms",
        tiers=(("serve", 1, 12),),
        initial=(2,),
        startup="uniform:60,120",
        hardware="h200-8b-hot",
        targets=reach,
        seeds=3,
    )
    documents = LengthDistribution(3000.0, 500.0, sigma=0.8)
    spells = (
        2.2, 2.6, 2.1, 3.0, 3.4, 2.8, 4.1, 4.6, 3.9, 5.2, 5.6, 4.4, 4.9, 3.1, 3.7,
        2.4, 2.9, 5.8, 6.1, 5.0, 4.2, 3.3, 2.7, 3.5, 2.0, 1.6, 2.3, 1.8, 2.5, 2.1,
    )  # fmt: skip
    yield BoardRow(
        "held-out-documents",
        "1.6 to 6.1 requests/s of 3,000/500 tokens, an hour in steps of two minutes; engines start in 100 to 135 s",
        PhasedLoad(tuple(RatePhase(120.0, rate, documents) for rate in spells)),
        ttft="3s",
        tpot="100ms",
        tiers=(("serve", 1, 8),),
        initial=(2,),
        startup="uniform:100,135",
        hardware="h100x2-32b",
        gpus=2,
        targets=reach,
        seeds=3,
    )


def _short_rows() -> Iterable[BoardRow]:
    """Small enough to be played with every change of the program."""
    yield BoardRow(
        "short",
        "6, 36 and 6 requests/s for 120, 180 and 120 s; engines start in 30 s",
        PhasedLoad((RatePhase(120.0, 6.0, _CHAT), RatePhase(180.0, 36.0, _CHAT), RatePhase(120.0, 6.0, _CHAT))),
        ttft="1s",
        tpot="40ms",
        tiers=_ONE_TIER,
        initial=(1,),
        startup="30",
        hardware="h200-8b-hot",
        targets=RowTargets(),
        seeds=4,
    )


_ALL_ROWS: Final = (
    *_guide_rows(),
    *_dynamo_rows(),
    *_disaggregated_rows(),
    *_constant_rows(),
    *_trace_rows(),
    *_sparse_rows(),
    *_retry_rows(),
    *_untuned_rows(),
    *_held_out_rows(),
)
BOARD_ROWS: Final[dict[str, BoardRow]] = {row.name: row for row in _ALL_ROWS}
RAISED_ROWS: Final = {row.name: _at_raised_load(row) for row in _constant_rows()}
SHORT_ROWS: Final[dict[str, BoardRow]] = {row.name: row for row in _short_rows()}
