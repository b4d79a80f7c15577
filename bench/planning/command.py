"""`python -m bench plan`: the plan's model beside other planners' results, as Markdown tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bench.planning import cases
from bench.planning.cases import RecordedComparison
from plimsoll.core.planning.fleet_plan import PlanFailure
from plimsoll.core.slo import Slo


def main(words: list[str]) -> int:
    """Prints all of it; a minute or two. It takes no words."""
    if words:
        print(__doc__)
        return 0 if {"-h", "--help"} & set(words) else 2
    print("DistServe: OPT-13B on A100, share within 200 ms and 100 ms\n")
    _table(("engine (GPUs)", "req/s", "real runs", "law", "p50 TPOT real, ms", "law, ms"), _distserve())
    their_heading, our_heading, vllm = cases.searched_goodput()
    print(
        f"\nBest rate a GPU at 90 %: found by DistServe's simulator {their_heading:.2f}, "
        f"by the law {our_heading:.2f}; ",
        end="",
    )
    print(f"vLLM on one GPU by the law {vllm:.2f}")
    print("\nAIConfigurator 0.12.0 (vLLM 0.24.0 tables), requests a second and GPU: aggregated / apart\n")
    head = ("model", "GPU", "tokens", "TTFT, TPOT ms", "AIConfigurator", "law, even lengths, p50", "law, spread, p95")
    _table(head, _aiconfigurator())
    print("\nTwo H200s: share kept by two aggregated engines / by one and one\n")
    _table(("mix", "req/s", "block", "TTFT/TPOT ms", "measured", "law", "winner measured", "by the law"), _recorded())
    print("\nWhat `plimsoll plan --hardware h200-8b` says for these runs\n")
    _table(("mix", "req/s", "TTFT/TPOT ms", "aggregated kept", "plan"), _planned())
    return 0


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    print("| " + " | ".join(head) + " |")
    print("|" + "---|" * len(head))
    for row in rows:
        print("| " + " | ".join(row) + " |", flush=True)


def _distserve() -> Iterable[Sequence[str]]:
    for run in cases.distserve():
        model = run.law.p50_tpot_s
        yield (
            f"{run.engine} ({run.gpus})", f"{run.rate_per_s:g}", f"{run.kept_real:.0%}", f"{run.kept_law:.0%}",
            f"{run.real_ms[1]:.0f}", "no end" if model is None or model > 60 else f"{model * 1e3:.0f}",
        )  # fmt: skip


def _aiconfigurator() -> Iterable[Sequence[str]]:
    for case_result in cases.aiconfigurator():
        case = case_result.case
        yield (
            case["model"].split("/")[1], cases.SYSTEMS[case["system"]], f"{case['prompt']}/{case['output']}",
            f"{case['ttft_ms']}, {case['tpot_ms']}",
            *map(_two_rates, (case_result.theirs, case_result.model_deterministic, case_result.model_spread)),
        )  # fmt: skip


def _two_rates(rates: tuple[float | None, float | None]) -> str:
    return " / ".join("-" if rate is None else f"{rate:.2f}" for rate in rates)


def _recorded() -> Iterable[Sequence[str]]:
    mixes = list(cases.recorded())
    for recorded_run in mixes:
        yield (
            recorded_run.mix, f"{recorded_run.rate_per_s:g}", f"{recorded_run.block_tokens}", _targets(recorded_run),
            *(f"{measured:.0%} / {modelled:.0%}" for measured, modelled in (recorded_run.real, recorded_run.law)),
            *recorded_run.winners,
        )  # fmt: skip
    agreeing = sum(recorded_run.winners[0] == recorded_run.winners[1] for recorded_run in mixes)
    disagreeing = sum(set(recorded_run.winners) == {"aggregated", "apart"} for recorded_run in mixes)
    yield ("all", "", "", "", "", "", f"same winner in {agreeing} of {len(mixes)}", f"the opposite in {disagreeing}")


def _targets(one: RecordedComparison) -> str:
    return f"{one.targets_ms[0]:g}/{one.targets_ms[1]:g}"


def _planned() -> Iterable[Sequence[str]]:
    for row in cases.load("h200_pairs.json")["rows"]:
        if row["engines"] != "agg":
            continue
        for name in ("500/50", "300/25", "200/15", "500/10"):
            ttft, tpot = (float(latency) / 1e3 for latency in name.split("/"))
            answer = cases.plan_recorded(row, Slo(0.95, ttft, 0.0, tpot))
            recommended = "no plan"
            if not isinstance(answer, PlanFailure):
                arrangement = "disaggregated" if answer.chosen.disaggregated else "aggregated"
                recommended = f"{arrangement}, {' + '.join(map(str, answer.chosen.replicas))}"
            yield row["mix"], f"{row['rate_per_s']:g}", name, f"{row['kept'][name]:.0%}", recommended
