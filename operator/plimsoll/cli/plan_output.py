"""Text and JSON output of a plan, with the same figures."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from plimsoll.cli.output import MISSING, Screen, format_duration_cell, format_table
from plimsoll.core.capacity.sizing import Infeasible
from plimsoll.core.planning.arrangement import Arrangement
from plimsoll.core.planning.expected_latency import ExpectedLatency
from plimsoll.core.planning.fleet_plan import FleetPlan, PlanFailure, TierEngineSettings
from plimsoll.core.slo import Slo
from plimsoll.core.types import Unavailable
from plimsoll.core.units import format_figure, format_number, format_rounded_duration
from plimsoll.sim.plan_simulation import PlanSimulation

_DIGITS: Final = 6


def plan_document(plan: FleetPlan, gpu_hour_cost: float | None) -> dict[str, Any]:
    """Return the document that `--json` prints: times in seconds, rates in requests/s, None for unbounded or unknown.

    The share `attained` is of all requests, including those that miss on an idle replica. infeasible_alone: share that
    misses on an idle replica; for two tiers, the shares are treated as independent.
    """
    chosen, question = plan.chosen, plan.request
    prompt, output = plan.mean_tokens
    return {
        "arrangement": "disaggregated" if chosen.disaggregated else "aggregated",
        "reasons": list(plan.reasons),
        "rate_per_s": _round(question.rate_per_s),
        "prompt_tokens": _round(prompt),
        "output_tokens": _round(output),
        "arrival_cv2": _round(question.arrival_cv2),
        "slo": {
            "share": question.slo.share,
            "ttft_s": question.slo.ttft_s,
            "ttft_per_1k_tokens_s": question.slo.ttft_per_1k_tokens_s,
            "tpot_s": question.slo.tpot_s,
            **({} if question.slo.e2e_s is None else {"e2e_s": question.slo.e2e_s}),
            **({} if question.slo.itl_s is None else {"itl_s": question.slo.itl_s}),
            "itl_limit_s": question.itl_limit_s,
        },
        "gpus": chosen.gpus,
        "binding": str(chosen.binding_constraint),
        "slo_capacity_per_s": _round(chosen.slo_capacity_per_s),
        "goodput_knee_per_s": _round(chosen.goodput_knee_per_s),
        "infeasible_alone": _round(1 - math.prod(1 - sizing.infeasible_share for sizing in chosen.sizings)),
        "longer_than_max_model_len": _round(chosen.too_long_share),
        "expected": _expected_times(plan.expected_latency),
        "expected_at_slo_capacity": _expected_times(plan.expected_latency_at_capacity),
        "tiers": {str(role): tier for role, tier in _tier_documents(plan).items()},
        "other": _alternative(plan.alternative),
        "cost": None if gpu_hour_cost is None else _cost_document(plan, gpu_hour_cost),
        "curve": [
            [_round(p.rate_per_s), _round(p.without_admission_per_s), _round(p.with_admission_per_s)]
            for p in plan.goodput_curve
        ],
    }  # fmt: skip


def _tier_documents(plan: FleetPlan) -> dict[str, dict[str, Any]]:
    chosen = plan.chosen
    rows = zip(chosen.tiers, chosen.machines, chosen.sizings, plan.settings, strict=True)
    return {
        str(tier.role): {
            "replicas": sizing.replicas,
            "gpus_per_replica": machine.gpus,
            "utilisation": _round(sizing.utilisation),
            "attained": _round(sizing.attainment),
            "attained_with_one_fewer": _round(sizing.attainment_one_fewer),
            "slo_capacity_per_s": _round(sizing.slo_capacity_per_s),
            "binding": str(sizing.constraint),
            "kv_tokens": machine.limits.kv_tokens,
            "steps": "profile" if machine.from_profile else "roofline",
            **_settings_document(settings),
        }
        for tier, machine, sizing, settings in rows
    }


def _settings_document(settings: TierEngineSettings) -> dict[str, Any]:
    advice, graphs = settings.speculation, settings.cuda_graphs
    return {
        "max_num_seqs": settings.max_num_seqs,
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        "max_itl_s": _round(settings.max_itl_s),
        "mean_batch": _round(settings.mean_batch),
        "speculation": None
        if advice is None
        else {
            "on": advice.enabled,
            "up_to_batch": advice.max_batch,
            "gain": _round(advice.gain),
            "reason": advice.reason,
        },
        "cuda_graphs": None if graphs is None else {"args": list(graphs.args), "reason": graphs.reason},
    }


def _cost_document(plan: FleetPlan, gpu_hour_cost: float) -> dict[str, Any]:
    rates = {"at_this_load": plan.request.rate_per_s, "at_slo_capacity": plan.chosen.slo_capacity_per_s}
    return {
        "per_gpu_hour": gpu_hour_cost,
        "per_hour": _round(gpu_hour_cost * plan.chosen.gpus),
        "per_million_tokens": {k: _round(plan.cost_per_million(gpu_hour_cost, r, False)) for k, r in rates.items()},
        "per_million_output_tokens": {
            k: _round(plan.cost_per_million(gpu_hour_cost, r, True)) for k, r in rates.items()
        },
    }


def _expected_times(times: ExpectedLatency) -> dict[str, float | None]:
    return {name: _round(getattr(times, name)) for name in ExpectedLatency.__dataclass_fields__}


def _alternative(alternative: Arrangement | Infeasible | None) -> dict[str, Any] | None:
    if alternative is None:
        return None
    if isinstance(alternative, Infeasible):
        return {"infeasible": str(alternative.constraint)}
    return {
        "arrangement": "disaggregated" if alternative.disaggregated else "aggregated",
        "gpus": alternative.gpus,
        "replicas": {
            str(tier.role): count for tier, count in zip(alternative.tiers, alternative.replicas, strict=True)
        },
        "slo_capacity_per_s": _round(alternative.slo_capacity_per_s),
    }


def _round(value: float | None) -> float | None:
    if value is None or not math.isfinite(value):
        return None
    return round(value, _DIGITS)


def simulation_document(plan: FleetPlan, simulation: PlanSimulation | Unavailable) -> dict[str, Any]:
    """Return what the simulation saw: shares of all requests, replicas by tier; or why there was none."""
    if isinstance(simulation, Unavailable):
        return {"unavailable": simulation.reason}
    return {
        "within_slo": _round(simulation.within_slo),
        "requests": simulation.requests,
        "model_replicas": {str(role): count for role, count in simulation.model_replicas.items()},
        "model_within_slo": _round(simulation.model_within_slo),
    }


def _simulation_lines(plan: FleetPlan, simulation: PlanSimulation | Unavailable) -> list[str]:
    if isinstance(simulation, Unavailable):
        return [f"not simulated: {simulation.reason}"]
    lines = [
        f"simulated: {simulation.within_slo:.1%} of {simulation.requests:,} requests within the SLO"
        f" (target {plan.request.slo.share:.0%}), with admission control"
    ]
    if simulation.model_replicas != plan.chosen.counts:
        counts = " + ".join(f"{count} {role}" for role, count in simulation.model_replicas.items())
        lines.append(
            f"  the model alone says {counts} replicas; simulated, these keep {simulation.model_within_slo:.1%}"
        )
    if simulation.within_slo < plan.request.slo.share:
        lines.append("  do not trust this plan: measure a hardware profile, or relax the SLO")
    return lines


def plan_lines(
    plan: FleetPlan, simulation: PlanSimulation | Unavailable, gpu_hour_cost: float | None, screen: Screen
) -> list[str]:
    """Return the plan as lines of text."""
    figures = plan_document(plan, gpu_hour_cost)
    parts = [f"{tier['replicas']} x {tier['gpus_per_replica']} GPU {role}" for role, tier in figures["tiers"].items()]
    head = f"{figures['arrangement']}: {' + '.join(parts)}, {figures['gpus']} GPUs"
    output = [screen.bold(head), *(f"  {reason}" for reason in figures["reasons"])]
    output += [*_simulation_lines(plan, simulation), ""]
    output += [*format_table(_load_rows(figures), screen), ""]
    output += format_table(_engine_rows(figures["tiers"]), screen)
    for role, tier in figures["tiers"].items():
        if tier["speculation"] is not None:
            advice = tier["speculation"]
            advice_text = f"on, engine.speculative.maxBatch {advice['up_to_batch']}" if advice["on"] else "off"
            output += ["", f"speculative decoding ({role}): {advice_text}; {advice['reason']}"]
        if tier["cuda_graphs"] is not None:
            graphs = tier["cuda_graphs"]
            output += ["", f"CUDA graphs ({role}): {graphs['reason']}", f"  {' '.join(graphs['args'])}"]
    if figures["infeasible_alone"]:
        output += [
            "",
            f"{figures['infeasible_alone']:.1%} of the requests miss the SLO even on an idle replica; more replicas "
            "do not help",
        ]
    if figures["longer_than_max_model_len"]:
        output.append(
            f"these include {figures['longer_than_max_model_len']:.1%} that the engine rejects, because prompt and "
            f"output exceed its max_model_len of {format_number(plan.request.max_model_len)} tokens"
        )
    if figures["cost"] is not None:
        output += ["", *_cost_lines(figures["cost"])]
    if plan.chosen.machines[0].from_profile:
        gpus = plan.chosen.machines[0].gpus
        output += [
            "",
            f"GPUs per replica: {gpus}, from --gpus-per-replica (default 1), because a profile has no GPU count.",
        ]
    else:
        output += ["", "Step times are roofline estimates, not measurements; docs/tasks/plan.md has their accuracy."]
    return output


def _load_rows(figures: Mapping[str, Any]) -> list[list[str]]:
    at_load, at_capacity = figures["expected"], figures["expected_at_slo_capacity"]
    rows = [["", "requested rate", "SLO capacity", "goodput knee"]]
    rates = (figures["rate_per_s"], figures["slo_capacity_per_s"], figures["goodput_knee_per_s"])
    rows.append(["requests/s", *(format_figure(rate) for rate in rates)])
    for key, name in (("ttft", "TTFT"), ("tpot", "TPOT")):
        for share in ("p50", "p95"):
            field = f"{share}_{key}_s"
            rows.append(
                [f"{share} {name}, all admitted", _format_time(at_load[field]), _format_time(at_capacity[field]), ""]
            )
    rows.append(["limited by", "", figures["binding"], ""])
    return rows


def _engine_rows(tiers: Mapping[str, Any]) -> list[list[str]]:
    keys = (
        "replicas", "gpus_per_replica", "max_num_seqs", "max_num_batched_tokens", "kv_tokens", "mean_batch",
        "max_itl_s", "utilisation", "attained", "attained_with_one_fewer",
    )  # fmt: skip
    return [["tier", *tiers], *([key, *(_format_cell(key, tier[key]) for tier in tiers.values())] for key in keys)]


def _format_cell(key: str, value: Any) -> str:
    if value is None:
        return MISSING
    if key in ("utilisation", "attained", "attained_with_one_fewer"):
        return f"{value:.1%}"
    if key.endswith("_s"):
        return format_duration_cell(value)
    return f"{value:.0f}" if isinstance(value, float) else f"{value}"


def _format_time(seconds: float | None) -> str:
    return "unbounded" if seconds is None else format_duration_cell(seconds)


def _cost_lines(cost: Mapping[str, Any]) -> list[str]:
    result = [f"{cost['per_hour']:.2f} per hour"]
    for key, name in (("per_million_tokens", "tokens"), ("per_million_output_tokens", "output tokens")):
        at_load, at_capacity = cost[key]["at_this_load"], cost[key]["at_slo_capacity"]
        result.append(
            f"{format_figure(at_load)} per million {name} at the requested rate, {format_figure(at_capacity)} at SLO "
            "capacity"
        )
    return result


def infeasible_lines(infeasible: PlanFailure) -> list[str]:
    """Return why no plan meets the SLO, and the nearest feasible targets."""
    messages = [f"plimsoll: {reason}" for reason in infeasible.reasons]
    if infeasible.infeasibility is not None:
        nearest_slo = infeasible.infeasibility.nearest_slo
        messages.append(
            "no looser targets are feasible"
            if nearest_slo is None
            else f"feasible targets: {_slo_options(nearest_slo)}"
        )
    return messages


def _slo_options(slo: Slo) -> str:
    targets = {
        "--ttft": slo.ttft_s,
        "--ttft-per-k-token": slo.ttft_per_1k_tokens_s or None,
        "--tpot": slo.tpot_s,
        "--e2e": slo.e2e_s,
        "--itl": slo.itl_s,
    }
    return " ".join(
        f"{option} {format_rounded_duration(_round_up(s))}" for option, s in targets.items() if s is not None
    )


def _round_up(seconds: float) -> float:
    """Round up to the two digits that the options have, because tighter targets might be infeasible."""
    step = 10.0 ** (math.floor(math.log10(seconds)) - 1)
    return math.ceil(seconds / step - 1e-6) * step
