"""`python -m bench plan`: the plan's law beside others' answers, as Markdown tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bench.planning import cases
from bench.planning.cases import Recorded
from plimsoll.core.planning.plan import NoPlan
from plimsoll.core.slo import Slo


def main(words: list[str]) -> int:
    """Prints all of it; a minute or two. It takes no words."""
    if words:
        print(__doc__)
        return 0 if {"-h", "--help"} & set(words) else 2
    print("DistServe: OPT-13B on A100, share within 200 ms and 100 ms\n")
    _table(("engine (GPUs)", "req/s", "real runs", "law", "p50 TPOT real, ms", "law, ms"), _distserve())
    theirs, ours, vllm = cases.searched()
    print(f"\nBest rate a GPU at 90 %: found by DistServe's simulator {theirs:.2f}, by the law {ours:.2f}; ", end="")
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
    for one in cases.distserve():
        law = one.law.p50_tpot_s
        yield (
            f"{one.engine} ({one.gpus})", f"{one.rate_per_s:g}", f"{one.kept_real:.0%}", f"{one.kept_law:.0%}",
            f"{one.real_ms[1]:.0f}", "no end" if law is None or law > 60 else f"{law * 1e3:.0f}",
        )  # fmt: skip


def _aiconfigurator() -> Iterable[Sequence[str]]:
    for one in cases.aiconfigurator():
        case = one.case
        yield (
            case["model"].split("/")[1], cases.SYSTEMS[case["system"]], f"{case['prompt']}/{case['output']}",
            f"{case['ttft_ms']}, {case['tpot_ms']}", *(_both(pair) for pair in (one.theirs, one.even, one.spread)),
        )  # fmt: skip


def _both(rates: tuple[float | None, float | None]) -> str:
    return " / ".join("-" if rate is None else f"{rate:.2f}" for rate in rates)


def _recorded() -> Iterable[Sequence[str]]:
    found = list(cases.recorded())
    for one in found:
        yield (
            one.mix, f"{one.rate_per_s:g}", f"{one.block_tokens}", _targets(one),
            *(f"{a:.0%} / {b:.0%}" for a, b in (one.real, one.law)), *one.winners,
        )  # fmt: skip
    same = sum(one.winners[0] == one.winners[1] for one in found)
    opposite = sum(set(one.winners) == {"aggregated", "apart"} for one in found)
    yield ("all", "", "", "", "", "", f"same winner in {same} of {len(found)}", f"the opposite in {opposite}")


def _targets(one: Recorded) -> str:
    return f"{one.targets_ms[0]:g}/{one.targets_ms[1]:g}"


def _planned() -> Iterable[Sequence[str]]:
    for row in cases.load("h200_pairs.json")["rows"]:
        if row["engines"] != "agg":
            continue
        for name in ("500/50", "300/25", "200/15", "500/10"):
            ttft, tpot = (float(part) / 1e3 for part in name.split("/"))
            found = cases.planned(row, Slo(0.95, ttft, 0.0, tpot))
            said = "no plan"
            if not isinstance(found, NoPlan):
                kind = "disaggregated" if found.chosen.disaggregated else "aggregated"
                said = f"{kind}, {' + '.join(map(str, found.chosen.replicas))}"
            yield row["mix"], f"{row['rate_per_s']:g}", name, f"{row['kept'][name]:.0%}", said
