"""The rows: what is asked of whom, on which machine, and which figures are to be reached.

A row is data: a load, a promise, bounds, a machine with its start-up times, and a reach. Figures of other systems that
the reaches come from are told in `docs/scoreboard.md`. Each row is also played on a plant that takes 0.7 and 1.4 times
as long for every step; there followers on the same plant are what it is judged by, not the absolute figures.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Final

from bench.scoreboard.loads import Lengths, Load, Phase, Phases, Renewal, Sine
from bench.scoreboard.slices import Slice

PLANTS: Final = (1.0, 0.7, 1.4)  # seconds of a step over the nominal ones
OTHERS: Final = PLANTS[1:]


@dataclass(frozen=True)
class Reach:
    """What Plimsoll has to reach, as means over the seeds; None where a row does not ask for it.

    offered, admitted: least attainment. gpu_hours, mean_replicas: most. behind: by how much the best follower at
    `at_cost` times our GPU-hours may be better. times_best: most GPU-hours over those of the cheapest that attains as
    much and does not know the future. windows: least share of windows that pass. reversals: most in a phase.
    above_least: most replicas, in the mean after the first hour, above the smallest constant fleet that keeps the
    promise. tickets: least share of the tickets of up to 60 s whose holders get in at their first retry, and of those
    of 60 to 120 s by their second.
    """

    offered: float | None = None
    admitted: float | None = None
    gpu_hours: float | None = None
    mean_replicas: float | None = None
    behind: float | None = None
    at_cost: float = 1.0
    times_best: float | None = None
    windows: float | None = None
    reversals: int | None = None
    above_least: float | None = None
    tickets: float | None = None


@dataclass(frozen=True)
class Row:
    """One line of the board. tiers: least and most replicas of each, by name in the manifest; gpus of a replica.

    initial: ready replicas, in the order of the tiers. start_up, hardware: as `plimsoll simulate` takes them. seeds: of
    how many a figure is the mean. more: further fields of the manifest's spec.
    """

    name: str
    says: str
    load: Load
    ttft: str
    tpot: str
    tiers: tuple[tuple[str, int, int], ...]
    initial: tuple[int, ...]
    start_up: str
    hardware: str
    reach: Reach
    gpus: int = 1
    seeds: int = 5
    more: tuple[tuple[str, Any], ...] = ()
    ttft_per_k_token: str | None = None
    percentile: int = 95
    clients: str = "none"

    @property
    def by_windows(self) -> bool:
        """Whether who does as well is judged by the windows that pass, not by attainment."""
        return self.reach.windows is not None or self.reach.above_least is not None

    def manifest(self) -> dict[str, Any]:
        """The row's InferenceService."""
        slo = {"percentile": self.percentile, "ttft": self.ttft, "tpot": self.tpot}
        if self.ttft_per_k_token is not None:
            slo["ttftPerKToken"] = self.ttft_per_k_token
        tiers = {
            name: {"minReplicas": least, "maxReplicas": most, "gpus": self.gpus} for name, least, most in self.tiers
        }
        spec = {"model": {"uri": "hf://Qwen/Qwen3-8B"}, "slo": slo, "tiers": tiers, **dict(self.more)}
        return {
            "apiVersion": "plimsoll.dev/v1alpha1",
            "kind": "InferenceService",
            "metadata": {"name": "board", "namespace": "default"},
            "spec": spec,
        }


_CHAT: Final = Lengths(2048.0, 256.0)
_GUIDE: Final = Lengths(4000.0, 1000.0, sigma=0.0)
_STEP: Final = Phases((Phase(300.0, 6.0, _CHAT), Phase(900.0, 36.0, _CHAT), Phase(600.0, 6.0, _CHAT)))
_RAMP: Final = Sine(5.0, 31.0, 1800.0, _CHAT)
_STAIRS: Final = Phases(tuple(Phase(360.0, rate, _GUIDE) for rate in (2.0, 4.0, 6.0, 8.0, 10.0, 4.0, 1.0)))
_LONG, _TALK = Lengths(4000.0, 100.0), Lengths(300.0, 1000.0)
_SHIFT: Final = Phases((Phase(600.0, 10.0, _LONG), Phase(600.0, 20.0, _TALK), Phase(600.0, 10.0, _LONG)))
_ONE: Final = (("serve", 1, 8),)
_PAIR: Final = (("prefill", 1, 4), ("decode", 1, 4))

_RATES: Final = (0.7, 1.3, 1.4, 2.0, 2.7, 2.85, 4.0, 5.5, 5.7, 8.0)

# Start-up time in seconds: attainment over offered, GPU-hours.
_STEPS: Final = {0: (0.985, 1.07), 30: (0.965, 1.27), 60: (0.95, 1.28), 120: (0.94, 1.30), 240: (0.91, 1.33)}


def _dynamo() -> Iterable[Row]:
    fixed: dict[str, Any] = {"ttft": "1s", "tpot": "40ms", "tiers": _ONE, "initial": (1,), "hardware": "h200-8b-hot"}
    for start_s, (offered, gpu_hours) in _STEPS.items():
        reach = Reach(offered, 0.99, gpu_hours, behind=0.01)
        says = f"6, 36 and 6 requests/s for 300, 900 and 600 s; engines start in {start_s} s"
        yield Row(f"step-{start_s}", says, _STEP, start_up=str(start_s), reach=reach, seeds=10, **fixed)
    says = "5 + 31 sin(pi t / 1800 s) requests/s for 1,800 s; engines start in 120 s"
    yield Row(
        "ramp-120", says, _RAMP, start_up="120", reach=Reach(0.985, 0.99, 1.38, behind=0.02, at_cost=1 / 1.05), **fixed
    )


def _disaggregated() -> Iterable[Row]:
    reach = Reach(0.96, 0.99, times_best=1.10)
    fixed: dict[str, Any] = {"ttft": "1s", "tpot": "40ms", "tiers": _PAIR, "hardware": "h200-8b", "reach": reach}
    says = "the step on prefill and decode engines that start in 60 s"
    yield Row("step-60-pd", says, _STEP, initial=(1, 1), start_up="60", **fixed)
    says = "10 requests/s of 4,000/100 tokens, 20 of 300/1,000, 10 of 4,000/100, 600 s each; engines start in 60 s"
    yield Row("shift-60-pd", says, _SHIFT, initial=(1, 1), start_up="60", **fixed)


def _guide() -> Iterable[Row]:
    yield Row(
        "guide",
        "2, 4, 6, 8, 10, 4 and 1 requests/s for 360 s each, 4,000/1,000 tokens; engines start in 100 to 135 s",
        _STAIRS,
        ttft="3s",
        tpot="100ms",
        tiers=(("serve", 3, 8),),
        initial=(3,),
        start_up="uniform:100,135",
        hardware="h100x2-32b",
        gpus=2,
        reach=Reach(0.985, mean_replicas=5.25, behind=0.02, at_cost=1 / 1.05),
    )


def _constant() -> Iterable[Row]:
    reach = Reach(reversals=1, above_least=0.2)
    lengths = Lengths(4000.0, 1000.0)
    for rate in _RATES:
        for name, cv in (("poisson", 1.0), ("bursty", 2.0)):
            yield Row(
                f"constant-{rate:g}-{name}",
                f"{rate:g} requests/s for six hours, gaps of CV {cv:g}, 4,000/1,000 tokens; engines start in 60 s",
                Renewal(rate, cv, 6 * 3600.0, lengths),
                ttft="3s",
                tpot="100ms",
                tiers=(("serve", 1, 10),),
                initial=(1,),
                start_up="60",
                hardware="h100x2-32b",
                gpus=2,
                reach=reach,
                seeds=1,
            )


def _raised(row: Row) -> Row:
    """The same service at 5 % more load: a fleet that keeps its promise there too is not just below its limit."""
    assert isinstance(row.load, Renewal)
    return replace(row, name=f"{row.name}+5%", load=replace(row.load, rate=1.05 * row.load.rate))


def _traces() -> Iterable[Row]:
    """Ready at the start is what the first minute needs, about the least constant fleet that passes: with three engines
    for nine engines' load no policy could pass those windows.

    Of `mooncake` nothing is asked: its rate is constant, so that there is nothing to scale, and it is too short for 200
    windows. It shows shared beginnings, and prompts that the model does not hold.
    """
    reach = Reach(windows=0.99, times_best=1.10)
    fixed: dict[str, Any] = {"reach": reach, "start_up": "uniform:60,120", "seeds": 3}
    yield Row(
        "azure-code",
        "Azure code 2023, 18 copies laid over each other: 46 requests/s; engines start in 60 to 120 s",
        Slice("azure-code-2023.csv.gz", 3436.4, 18.0),
        ttft="500ms",
        tpot="40ms",
        ttft_per_k_token="150ms",
        tiers=(("serve", 1, 10),),
        initial=(9,),
        hardware="h200-8b-hot",
        **fixed,
    )
    yield Row(
        "servegen-large",
        "ServeGen m-large, an hour of rising load, 2.7 copies: 28 requests/s on a 70B; engines start in 60 to 120 s",
        Slice("servegen-m-large-hour.csv.gz", 3600.1, 2.7),
        ttft="2s",
        tpot="80ms",
        ttft_per_k_token="400ms",
        tiers=(("serve", 1, 12),),
        initial=(7,),
        hardware="h200-70b-capped",
        **fixed,
    )
    yield Row(
        "servegen-r1",
        "ServeGen DeepSeek-R1, an evening hour, 3.1 copies: 28 requests/s, long answers; engines start in 60 to 120 s",
        Slice("servegen-deepseek-r1-hour.csv.gz", 3600.0, 3.1),
        ttft="1s",
        tpot="40ms",
        ttft_per_k_token="200ms",
        tiers=(("serve", 1, 10),),
        initial=(4,),
        hardware="h200-8b-hot",
        **fixed,
    )
    yield Row(
        "servegen-r1-half-day",
        "ServeGen DeepSeek-R1, noon to midnight: 1 to 6 requests/s, long answers, a 70B; engines start in 60 to 120 s",
        Slice("servegen-deepseek-r1-half-day.csv.gz", 43_200.0),
        ttft="2s",
        tpot="80ms",
        ttft_per_k_token="400ms",
        tiers=(("serve", 1, 12),),
        initial=(7,),
        hardware="h200-70b",
        **fixed,
    )
    yield Row(
        "mooncake",
        "Mooncake's synthetic trace with its shared beginnings, 8 copies; engines start in 60 to 120 s",
        Slice("synthetic.csv.gz", 1030.0, 8.0, blocks=True),
        ttft="2s",
        tpot="40ms",
        ttft_per_k_token="200ms",
        tiers=(("serve", 1, 32),),
        initial=(28,),
        hardware="h200-8b-hot",
        **{**fixed, "reach": Reach()},
    )


def _sparse() -> Iterable[Row]:
    """From zero: a request that waited for an engine is late unless its class allows the start."""
    yield Row(
        "ragpulse-week",
        "RAGPulse, a week of 7,106 requests from and to zero; engines start in 60 s",
        Slice("ragpulse-week.csv.gz", 7 * 86_400.0),
        ttft="1s",
        tpot="50ms",
        ttft_per_k_token="100ms",
        tiers=(("serve", 0, 2),),
        initial=(0,),
        start_up="60",
        hardware="h200-8b-hot",
        reach=Reach(),
        seeds=1,
        more=(("admission", {"classes": [{"name": "default", "holdFor": "2m"}]}),),
    )


def _returning() -> Iterable[Row]:
    load = Phases((Phase(300.0, 6.0, _CHAT), Phase(600.0, 20.0, _CHAT)))
    for clients in ("honour", "ignore", "mixed"):
        yield Row(
            f"retry-{clients}",
            f"6, then 20 requests/s; engines start in 60 s; clients that were refused: {clients}",
            load,
            ttft="1s",
            tpot="40ms",
            tiers=(("serve", 1, 4),),
            initial=(1,),
            start_up="60",
            hardware="h200-8b-hot",
            reach=Reach(tickets=0.95),
            clients=clients,
        )


def _unseen() -> Iterable[Row]:
    """Loads that nothing was ever tuned for, and of which nothing is asked. One engine, or none, is there at first."""
    fixed: dict[str, Any] = {"ttft": "2s", "tpot": "60ms", "start_up": "60", "hardware": "h200-70b", "reach": Reach()}
    chat = Lengths(2000.0, 250.0, sigma=0.6)
    one: dict[str, Any] = {**fixed, "tiers": (("serve", 1, 14),), "initial": (1,)}
    high, low = Phase(60.0, 8.0, chat), Phase(60.0, 1.0, chat)
    says = "8 and 1 requests/s by turns of 60 s on a 70B; engines start in 60 s"
    yield Row("unseen-square", says, Phases((high, low) * 15), **one)
    says = "8 requests/s for 450 s, four times what one 70B carries, then 2; engines start in 60 s"
    yield Row("unseen-flood", says, Phases((Phase(450.0, 8.0, chat), Phase(450.0, 2.0, chat))), **one)
    spell = (Phase(300.0, 3.3, chat), Phase(600.0, 0.0, chat))
    yield Row(
        "unseen-naps-pd",
        "3.3 requests/s for 300 s of every 900, on a pair of 70B tiers from and to zero; engines start in 60 s",
        Phases(spell * 3),
        tiers=(("prefill", 0, 4), ("decode", 0, 4)),
        initial=(0, 0),
        more=(("admission", {"classes": [{"name": "default", "holdFor": "2m"}]}),),
        **fixed,
    )


def _short() -> Iterable[Row]:
    """Small enough to be played with every change of the program."""
    yield Row(
        "short",
        "6, 36 and 6 requests/s for 120, 240 and 120 s; engines start in 30 s",
        Phases((Phase(120.0, 6.0, _CHAT), Phase(240.0, 36.0, _CHAT), Phase(120.0, 6.0, _CHAT))),
        ttft="1s",
        tpot="40ms",
        tiers=_ONE,
        initial=(1,),
        start_up="30",
        hardware="h200-8b-hot",
        reach=Reach(),
        seeds=6,
    )


_ALL: Final = (
    *_guide(),
    *_dynamo(),
    *_disaggregated(),
    *_constant(),
    *_traces(),
    *_sparse(),
    *_returning(),
    *_unseen(),
)
ROWS: Final[dict[str, Row]] = {row.name: row for row in _ALL}
RAISED: Final = {row.name: _raised(row) for row in _constant()}
SHORT: Final[dict[str, Row]] = {row.name: row for row in _short()}
