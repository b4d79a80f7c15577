"""A plan as people read it, and as JSON: both hold the same figures."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from plimsoll.cli.output import NONE, Screen, duration, table
from plimsoll.core.planning.arrange import Arrangement
from plimsoll.core.planning.expect import Expected
from plimsoll.core.planning.plan import NoPlan, Plan, Settings
from plimsoll.core.sizing import Infeasible
from plimsoll.core.slo import Slo

_DIGITS: Final = 6


def document(found: Plan, gpu_hour_cost: float | None) -> dict[str, Any]:
    """What `--json` prints; times in seconds, rates in requests a second, None for what is unbounded or unknown.

    attained: of all requests, those that miss alone included. infeasible_alone: of a pair, as if whom prefill fails
    were no likelier to be failed by decode.
    """
    chosen, asked = found.chosen, found.question
    prompt, output = found.mean_tokens
    return {
        "arrangement": "disaggregated" if chosen.disaggregated else "aggregated",
        "why": list(found.why),
        "rate_per_s": _number(asked.rate_per_s),
        "prompt_tokens": _number(prompt),
        "output_tokens": _number(output),
        "arrival_gap_cv2": _number(asked.gap_cv2),
        "slo": {
            "share": asked.slo.share,
            "ttft_s": asked.slo.ttft_s,
            "ttft_per_1k_tokens_s": asked.slo.ttft_per_1k_tokens_s,
            "tpot_s": asked.slo.tpot_s,
            **({} if asked.slo.e2e_s is None else {"e2e_s": asked.slo.e2e_s}),
            **({} if asked.slo.itl_s is None else {"itl_s": asked.slo.itl_s}),
            "gap_s": asked.gap_s,
        },
        "gpus": chosen.gpus,
        "binding": str(chosen.binding),
        "load_line_per_s": _number(chosen.load_line_per_s),
        "knee_per_s": _number(chosen.knee_per_s),
        "infeasible_alone": _number(1 - math.prod(1 - sizing.infeasible_alone for sizing in chosen.sizings)),
        "longer_than_max_model_len": _number(chosen.too_long),
        "expected": _expected(found.expected),
        "expected_at_load_line": _expected(found.expected_at_line),
        "tiers": {str(role): tier for role, tier in _tiers(found).items()},
        "other": _other(found.other),
        "cost": None if gpu_hour_cost is None else _cost(found, gpu_hour_cost),
        "curve": [
            [_number(p.rate_per_s), _number(p.open_per_s), _number(p.gated_per_s)] for p in found.curve
        ],
    }  # fmt: skip


def _tiers(found: Plan) -> dict[str, dict[str, Any]]:
    chosen = found.chosen
    rows = zip(chosen.tiers, chosen.machines, chosen.sizings, found.settings, strict=True)
    return {
        str(tier.role): {
            "replicas": sizing.replicas,
            "gpus_per_replica": machine.gpus,
            "utilisation": _number(sizing.utilisation),
            "attained": _number(sizing.attained),
            "attained_with_one_fewer": _number(sizing.one_fewer),
            "load_line_per_s": _number(sizing.slo_rate_per_s),
            "binding": str(sizing.constraint),
            "kv_tokens": machine.limits.kv_tokens,
            "steps": "profile" if machine.measured else "roofline",
            **_settings(settings),
        }
        for tier, machine, sizing, settings in rows
    }


def _settings(own: Settings) -> dict[str, Any]:
    advice, graphs = own.speculation, own.graphs
    return {
        "max_num_seqs": own.max_num_seqs,
        "max_num_batched_tokens": own.max_num_batched_tokens,
        "longest_gap_s": _number(own.longest_gap_s),
        "mean_batch": _number(own.mean_batch),
        "speculation": None
        if advice is None
        else {"on": advice.on, "up_to_batch": advice.up_to_batch, "gain": _number(advice.gain), "why": advice.why},
        "cuda_graphs": None if graphs is None else {"args": list(graphs.args), "why": graphs.why},
    }


def _cost(found: Plan, gpu_hour_cost: float) -> dict[str, Any]:
    rates = {"at_this_load": found.question.rate_per_s, "at_the_load_line": found.chosen.load_line_per_s}
    return {
        "per_gpu_hour": gpu_hour_cost,
        "per_hour": _number(gpu_hour_cost * found.chosen.gpus),
        "per_million_tokens": {k: _number(found.cost_per_million(gpu_hour_cost, r, False)) for k, r in rates.items()},
        "per_million_output_tokens": {
            k: _number(found.cost_per_million(gpu_hour_cost, r, True)) for k, r in rates.items()
        },
    }


def _expected(times: Expected) -> dict[str, float | None]:
    return {name: _number(getattr(times, name)) for name in Expected.__dataclass_fields__}


def _other(other: Arrangement | Infeasible | None) -> dict[str, Any] | None:
    if other is None:
        return None
    if isinstance(other, Infeasible):
        return {"infeasible": str(other.constraint)}
    return {
        "arrangement": "disaggregated" if other.disaggregated else "aggregated",
        "gpus": other.gpus,
        "replicas": {str(tier.role): count for tier, count in zip(other.tiers, other.replicas, strict=True)},
        "load_line_per_s": _number(other.load_line_per_s),
    }


def _number(value: float | None) -> float | None:
    if value is None or not math.isfinite(value):
        return None
    return round(value, _DIGITS)


def lines(found: Plan, gpu_hour_cost: float | None, screen: Screen) -> list[str]:
    """For people."""
    told = document(found, gpu_hour_cost)
    parts = [f"{tier['replicas']} x {tier['gpus_per_replica']} GPU {role}" for role, tier in told["tiers"].items()]
    head = f"{told['arrangement']}: {' + '.join(parts)}, {told['gpus']} GPUs"
    shown = [screen.bold(head), *(f"  {reason}" for reason in told["why"]), ""]
    shown += [*table(_load(told), screen), ""]
    shown += table(_engines(told["tiers"]), screen)
    for role, tier in told["tiers"].items():
        if tier["speculation"] is not None:
            advice = tier["speculation"]
            words = f"on up to a batch of {advice['up_to_batch']}" if advice["on"] else "off"
            shown += ["", f"speculative decoding ({role}): {words}; {advice['why']}"]
        if tier["cuda_graphs"] is not None:
            graphs = tier["cuda_graphs"]
            shown += ["", f"CUDA graphs ({role}): {graphs['why']}", f"  {' '.join(graphs['args'])}"]
    if told["infeasible_alone"]:
        shown += [
            "",
            f"{told['infeasible_alone']:.1%} of the requests miss alone on an idle replica: no size helps them",
        ]
    if told["longer_than_max_model_len"]:
        shown.append(
            f"{told['longer_than_max_model_len']:.1%} are among them that the engine refuses: longer than its "
            f"max_model_len of {found.question.max_model_len:g} tokens, prompt and answer together"
        )
    if told["cost"] is not None:
        shown += ["", *_money(told["cost"])]
    if found.chosen.machines[0].measured:
        gpus = found.chosen.machines[0].gpus
        shown += ["", f"GPUs a replica: {gpus}, by --gpus-per-replica (1 if not given), since a profile does not say."]
    else:
        shown += ["", "Steps are from the roofline, not measured: see docs/tasks/plan.md for how far it has been off."]
    return shown


def _load(told: Mapping[str, Any]) -> list[list[str]]:
    now, line = told["expected"], told["expected_at_load_line"]
    rows = [["", "asked for", "at the load line", "knee"]]
    rates = (told["rate_per_s"], told["load_line_per_s"], told["knee_per_s"])
    rows.append(["requests/s", *(f"{rate:.3g}" for rate in rates)])
    for key, name in (("ttft", "TTFT"), ("tpot", "TPOT")):
        for share in ("p50", "p95"):
            field = f"{share}_{key}_s"
            rows.append([f"{share} {name}, all let in", _time(now[field]), _time(line[field]), ""])
    rows.append(["runs into", "", told["binding"], ""])
    return rows


def _engines(tiers: Mapping[str, Any]) -> list[list[str]]:
    keys = (
        "replicas", "gpus_per_replica", "max_num_seqs", "max_num_batched_tokens", "kv_tokens", "mean_batch",
        "longest_gap_s", "utilisation", "attained", "attained_with_one_fewer",
    )  # fmt: skip
    return [["tier", *tiers], *([key, *(_cell(key, tier[key]) for tier in tiers.values())] for key in keys)]


def _cell(key: str, value: Any) -> str:
    if value is None:
        return NONE
    if key in ("utilisation", "attained", "attained_with_one_fewer"):
        return f"{value:.1%}"
    if key.endswith("_s"):
        return duration(value)
    return f"{value:.0f}" if isinstance(value, float) else f"{value}"


def _time(seconds: float | None) -> str:
    return "no end" if seconds is None else duration(seconds)


def _money(cost: Mapping[str, Any]) -> list[str]:
    found = [f"{cost['per_hour']:.2f} an hour"]
    for key, name in (("per_million_tokens", "tokens"), ("per_million_output_tokens", "output tokens")):
        now, line = cost[key]["at_this_load"], cost[key]["at_the_load_line"]
        found.append(f"{now:.3g} for a million {name} at this load, {line:.3g} at the load line")
    return found


def refused(found: NoPlan) -> list[str]:
    """Where no plan keeps the promise: what breaks it, and the nearest promise that holds."""
    said = [f"plimsoll: {reason}" for reason in found.why]
    if found.found is not None:
        nearest = found.found.feasible
        said.append("nothing looser would hold either" if nearest is None else f"it would keep {_promise(nearest)}")
    return said


def _promise(slo: Slo) -> str:
    targets = {
        "--ttft": slo.ttft_s,
        "--ttft-per-k-token": slo.ttft_per_1k_tokens_s or None,
        "--tpot": slo.tpot_s,
        "--e2e": slo.e2e_s,
        "--itl": slo.itl_s,
    }
    return " ".join(f"{option} {duration(_up(s))}" for option, s in targets.items() if s is not None)


def _up(seconds: float) -> float:
    """Rounded up to the two digits that `duration` shows: a tighter promise might not be kept."""
    step = 10.0 ** (math.floor(math.log10(seconds)) - 1)
    return math.ceil(seconds / step - 1e-6) * step
