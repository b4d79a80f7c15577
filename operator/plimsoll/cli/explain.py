"""`plimsoll explain NAME`: the last decision step by step, its inputs, and the decisions before it.

The leading operator serves the document through the API server's pod proxy, with the permissions of the user.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, Final

from plimsoll.cli import cluster, kubeconfig
from plimsoll.cli.json_access import get_int, get_list, get_mapping, get_number, get_text, get_value
from plimsoll.cli.output import (
    MISSING,
    Screen,
    format_duration,
    format_optional,
    format_table,
    format_wait_or_missing,
    hanging_indent,
    join_nonempty,
    printable_line,
    truncate,
)
from plimsoll.cli.output_files import print_text
from plimsoll.core.units import format_figure

DOCUMENT_VERSION: Final = 2  # version of the operator's document
_INDENT: Final = "  "
_MAX_UNIX_S: Final = 2.0**33
_BASIS_LABELS: Final = ("engine", "tuning", "model", "", "SLO capacity", "forecast", "start-up", "restart")
_COEFFICIENTS: Final = (
    ("base_s", "per step"),
    ("any_prefill_s", "more per step with prefill"),
    ("prefill_token_s", "per prompt token"),
    ("prefill_pair_s", "per prompt token and preceding token"),
    ("sequence_s", "per sequence"),
    ("cached_token_s", "per cached token"),
)


def run(arguments: argparse.Namespace) -> int:
    namespace = arguments.namespace or kubeconfig.current_namespace(arguments.kubeconfig)
    document = asyncio.run(_fetch(arguments, namespace))
    if arguments.json:
        print_text(json.dumps(document, indent=2) + "\n")
    else:
        print_text("\n".join([*render_document(document, Screen.for_stream(sys.stdout)), ""]))
    return 0


async def _fetch(arguments: argparse.Namespace, namespace: str) -> Any:
    async with cluster.connect(arguments.kubeconfig) as kube:
        return await cluster.get_explanation(kube, namespace, arguments.name, arguments.operator_namespace)


def render_document(document: Any, screen: Screen) -> list[str]:
    """Return the document as lines of text. Raises ClusterQueryError for an unsupported document version."""
    if get_int(document, "version") != DOCUMENT_VERSION:
        version = get_value(document, "version")
        raise cluster.ClusterQueryError(
            f"the operator's document has version {version!r:.40}, this program supports {DOCUMENT_VERSION}; use --json"
        )
    decisions = get_list(document, "decisions")
    lines = hanging_indent("", _heading(document, decisions), screen)
    if not decisions:
        lines += ["", "No decision yet: the operator has just started to observe the service."]
    for last in decisions[:1]:
        lines += _last_decision(last, screen)
    lines += _metrics_section(get_mapping(document, "metrics"), get_mapping(document, "slo"), screen)
    lines += _basis_section(get_mapping(document, "tiers"), screen)
    lines += _limits_section(get_mapping(document, "admission"), screen)
    return lines + _earlier_decisions(decisions[1:], screen)


def _heading(document: Any, decisions: list[Any]) -> str:
    """Return the service, the time of the document and the time of the last decision."""
    heading = f"{get_text(document, 'service') or MISSING} at {get_text(document, 'at') or MISSING}"
    return f"{heading}, decided at {get_text(decisions[0], 'at') or MISSING}" if decisions else heading


# ---------------------------------------------------------------- the last decision


def _last_decision(decision: Any, screen: Screen) -> list[str]:
    binding = get_text(decision, "binding")
    lines = []
    for name, tier in get_mapping(decision, "tiers").items():
        binding_text = ", binding tier" if name == binding else ""
        lines += [
            "",
            *(
                screen.bold(line)
                for line in hanging_indent("", f"{name} {_replica_change(tier)}{binding_text}", screen)
            ),
        ]
        lines += format_table(_steps(tier), screen, _INDENT, head=False)
        facts = [[label, words] for label, words in _facts(tier) if words]
        lines += ["", *format_table(facts, screen, _INDENT, head=False)] if facts else []
    return lines


def _replica_change(tier: Any) -> str:
    before, after, recommended = get_int(tier, "before"), get_int(tier, "replicas"), get_int(tier, "recommended")
    if before is None:
        return f"{_format_count(after)}, not observed"
    if recommended is not None and recommended != after:
        return f"stays {_format_count(after)}, recommended {recommended}"
    return f"stays {before}" if before == after else f"{before} -> {_format_count(after)}"


def _steps(tier: Any) -> list[list[str]]:
    return [
        [
            f"{place}.",
            get_text(step, "name") or MISSING,
            _format_count(get_int(step, "replicas")),
            get_text(step, "reason") or MISSING,
        ]
        for place, step in enumerate(get_list(tier, "steps"), 1)
    ]


def _facts(tier: Any) -> Iterable[tuple[str, str]]:
    etas = [get_number(eta) for eta in get_list(tier, "etas_s")]
    yield "otherwise", get_text(tier, "counterfactual") or ""
    yield "limited by", _joined_items(tier, "limits")
    yield (
        "frozen",
        "the demand is unknown, so the replica count does not change" if get_value(tier, "frozen") is True else "",
    )
    yield "starting", f"{len(etas)}, expected ready in {join_nonempty(map(format_duration, etas))}" if etas else ""
    yield "overdue", _joined_items(tier, "overdue")


# ---------------------------------------------------------------- metrics


def _metrics_section(metrics_document: dict[str, Any], slo: dict[str, Any], screen: Screen) -> list[str]:
    """Return no lines if the document has no metrics."""
    if not metrics_document:
        return []
    rows_by_name = {
        "demand" if get_text(metrics_document, "gateways", "source") else "gateways": _gateway_metrics(
            get_value(metrics_document, "gateways")
        ),
        "requests": _request_metrics(get_value(metrics_document, "requests")),
        "SLO": _slo_metrics(slo),
    }
    rows_by_name |= {name: _engine_metrics(tier) for name, tier in get_mapping(metrics_document, "tiers").items()}
    head = f"metrics at {get_text(metrics_document, 'at') or MISSING}"
    rows = [[name, words] for name, words in rows_by_name.items() if words]
    lines = [screen.bold(line) for line in hanging_indent("", head, screen)]
    return ["", *lines, *format_table(rows, screen, _INDENT, head=False)]


def _gateway_metrics(metrics: Any) -> str:
    if (missing := _missing_reason(metrics, "rate_per_s")) is not None:
        return missing
    rejected_share = get_number(metrics, "rejected_share")
    return join_nonempty(
        [
            _freshness(metrics),
            f"{format_optional(get_number(metrics, 'rate_per_s'))} req/s arrival rate",
            f"{rejected_share:.0%} rejected" if rejected_share is not None else "",
            f"{format_optional(get_number(metrics, 'queued'))} queued",
            f"{format_optional(get_number(metrics, 'in_flight'))} in flight",
            get_text(metrics, "source") or "",
            skipped_prefill(metrics),
        ]
    )


def skipped_prefill(gateways: Any) -> str:
    """Return the figures of requests that no prefill engine has seen; empty for none.

    gateways: the figures of demand in the operator's document.
    """
    rate, share = (get_number(gateways, "skipped_prefill", name) for name in ("per_s", "share"))
    if rate is None or share is None:
        return ""
    of_decode = f"{share:.0%} of the decode engines' requests"
    return f"{format_figure(rate)} req/s more, {of_decode}, skip prefill and are prefill work there"


def _request_metrics(metrics: Any) -> str:
    if (missing := _unavailable_reason(metrics)) is not None:
        return missing
    cached = get_number(metrics, "cached_tokens")
    cached_text = f" ({format_optional(cached)} cached)" if cached else ""
    prompt, output = get_number(metrics, "mean_prompt_tokens"), get_number(metrics, "output_tokens")
    return f"mean {format_optional(prompt)} prompt tokens{cached_text}, {format_optional(output)} output tokens"


def _slo_metrics(slo: dict[str, Any]) -> str:
    """The figures of `status.slo` and their window, as `plimsoll status` prints them."""
    latencies = [f"{name.upper()} {text}" for name in ("ttft", "tpot", "e2e", "itl") if (text := get_text(slo, name))]
    met, window_s = get_text(slo, "attainment"), get_number(slo, "window_s")
    figures = join_nonempty([*latencies, f"{met} met all targets" if met else ""])
    return f"{figures} (over {window_s:.0f} s, as in the status)" if figures and window_s is not None else figures


def _engine_metrics(metrics: Any) -> str:
    missing = _missing_reason(metrics, "running")
    return missing or join_nonempty(
        [_freshness(metrics), f"{format_optional(get_number(metrics, 'running'))} running requests"]
    )


def _missing_reason(metrics: Any, figure: str) -> str | None:
    """Return why the figure is unknown; None if it is known."""
    why = get_text(metrics, figure, "unknown")
    return None if why is None else f"unknown: {why}"


def _freshness(metrics: Any) -> str:
    """Return the age of the metrics, and the share of endpoints that report if some do not."""
    coverage, silent = get_number(metrics, "coverage"), get_text(metrics, "silent")
    coverage_text = "" if coverage in (None, 1.0) else f"{coverage:.0%} report{f', not {silent}' if silent else ''}"
    return join_nonempty([f"{format_wait_or_missing(get_number(metrics, 'age_s'))} old", coverage_text])


# ---------------------------------------------------------------- inputs


def _basis_section(tiers: dict[str, Any], screen: Screen) -> list[str]:
    lines = []
    for name, tier in tiers.items():
        basis_lines = (
            _engine_line(tier),
            _tuning_line(tier),
            _model_line(tier),
            _coefficients(tier),
            _capacity_line(tier),
            _forecast_line(tier),
            _startup_line(tier),
            _restart_line(tier),
        )
        rows = [[label, words] for label, words in zip(_BASIS_LABELS, basis_lines, strict=True) if words]
        lines += ["", *(screen.bold(line) for line in hanging_indent("", f"{name}, inputs", screen))]
        lines += format_table(rows, screen, _INDENT, head=False)
    return lines


def _engine_line(tier: Any) -> str:
    names = ("model", "accelerator", "parallelism", "engine_version")
    return join_nonempty(get_text(tier, "engine", name) or "" for name in names)


def _tuning_line(tier: Any) -> str:
    """Return the arguments that the operator has set on the engines, with the reasons, and what measurements say."""
    arguments = [
        f"{get_text(one, 'argument') or MISSING}: {get_text(one, 'reason') or MISSING}"
        for one in get_list(tier, "tuning")
    ]
    return "; ".join([*arguments, *filter(None, [get_text(tier, "retuning")])])


def _model_line(tier: Any) -> str:
    model = get_value(tier, "model")
    if (missing := _unavailable_reason(model)) is not None:
        return missing
    quantile = get_number(model, "quantile")
    pessimism = (
        "" if quantile is None else f"; sized for the p{format_figure(100.0 * quantile)} of the model's uncertainty"
    )
    return f"{get_text(model, 'summary') or MISSING}{pessimism}"


def _coefficients(tier: Any) -> str:
    coefficients = [(get_number(tier, "model", name), words) for name, words in _COEFFICIENTS]
    return join_nonempty(f"{format_duration(value)} {words}" for value, words in coefficients if value is not None)


def _capacity_line(tier: Any) -> str:
    capacity = get_value(tier, "capacity")
    if (missing := _unavailable_reason(capacity)) is not None:
        return missing
    capacity_text = (
        f"{format_optional(get_number(capacity, 'capacity_per_s'))} req/s per replica, "
        f"limited by {get_text(capacity, 'constraint') or MISSING}"
    )
    if request_class := get_text(capacity, "class"):
        capacity_text += f" of class {request_class}"
    infeasible = get_text(capacity, "infeasible", "summary")
    return f"{capacity_text}; {infeasible}" if infeasible else capacity_text


def _forecast_line(tier: Any) -> str:
    forecast = get_value(tier, "forecast")
    if (missing := _unavailable_reason(forecast)) is not None:
        return missing
    parts = ", ".join(
        f"{name} {format_optional(get_number(value))}" for name, value in get_mapping(forecast, "parts").items()
    )
    quantile = get_number(forecast, "quantile")
    quantile_text = f" at p{format_figure(100.0 * quantile)}" if quantile is not None else ""
    work, horizon = format_optional(get_number(forecast, "work")), format_duration(get_number(forecast, "horizon_s"))
    return f"{work} GPU-s/s within {horizon}{quantile_text}: {parts or MISSING}"


def _startup_line(tier: Any) -> str:
    image = get_text(tier, "startup", "variant", "image")
    unmeasured = f"estimate, no measured start{f' of {image}' if image else ''}"
    return _durations_text(get_value(tier, "startup"), "starts", unmeasured) or MISSING


def _restart_line(tier: Any) -> str:
    """Return the restarts of engines in their pods; empty before the first measured one."""
    return _durations_text(get_value(tier, "startup", "restart"), "restarts", "estimate")


def _durations_text(startup: Any, counted: str, unmeasured: str) -> str:
    phases = [
        f"{get_text(phase, 'name') or MISSING} {format_duration(get_number(phase, 'p50_s'))} to "
        f"{format_duration(get_number(phase, 'p90_s'))}"
        for phase in get_list(startup, "phases")
    ]
    observed, prior_s, measured_s = (get_number(startup, name) for name in ("startups", "prior_s", "measured_s"))
    parts = (
        f", counted as {format_duration(measured_s)}" if measured_s is not None else "",
        f"; estimate before them {format_duration(prior_s)}" if prior_s is not None else "",
    )
    source = f"measured {counted}: {observed:.0f}{''.join(parts)}" if observed else unmeasured
    return f"{', '.join(phases)} (p50 to p90; {source})" if phases else ""


def _unavailable_reason(value: Any) -> str | None:
    """Return why the value is unknown; None if it is known."""
    if not get_mapping(value):
        return MISSING
    why = get_text(value, "unknown")
    return None if why is None else f"unknown: {why}"


# ---------------------------------------------------------------- admission limits


def _limits_section(limits: dict[str, Any], screen: Screen) -> list[str]:
    """Return no lines if no admission limits are published."""
    if not limits:
        return []
    rows_by_name = {"slots": _slots_line(limits), "classes": _joined_items(limits, "classes"), "due": _due_line(limits)}
    rows = [[name, words] for name, words in rows_by_name.items() if words]
    return ["", screen.bold("admission limits"), *format_table(rows, screen, _INDENT, head=False)]


def _slots_line(limits: Any) -> str:
    batch = get_int(limits, "costModel", "batch")
    if batch is None:
        return "unlimited: no engine has reported its model"
    counts = {name: get_int(slots) or 0 for name, slots in get_mapping(limits, "shares").items()}
    shares = [f"{name} {slots}" for name, slots in counts.items()]
    if shares and (moving := batch - sum(counts.values())) > 0:
        shares.append(f"{moving} until another gateway releases them")
    head = f"{batch} {'sequence' if batch == 1 else 'sequences'} per engine"
    return f"{head}: {', '.join(shares)}" if shares else head


def _due_line(limits: Any) -> str:
    """Return when the next replica is expected, and the capacity with all that are ordered."""
    ready_s, capacity = get_number(limits, "readyAt"), format_optional(get_number(limits, "readyCapacity"))
    if ready_s is None or not 0.0 <= ready_s < _MAX_UNIX_S:
        return ""
    due = datetime.fromtimestamp(ready_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return f"next replica at {due}, {capacity} GPU-s/s with all that are ordered"


# ---------------------------------------------------------------- earlier decisions


def _earlier_decisions(decisions: list[Any], screen: Screen) -> list[str]:
    if not decisions:
        return []
    lines = [
        truncate(f"{_INDENT}{printable_line(get_text(one, 'at') or MISSING)}  ", _decision_changes(one), screen)
        for one in decisions
    ]
    return ["", screen.bold("earlier decisions"), *lines]


def _decision_changes(decision: Any) -> str:
    changes = [
        f"{name} {_replica_change(tier)}: {get_text(tier, 'reason') or MISSING}"
        for name, tier in get_mapping(decision, "tiers").items()
        if get_int(tier, "before") != get_int(tier, "recommended")
    ]
    return "; ".join(changes) or MISSING


def _joined_items(tier: Any, name: str) -> str:
    return join_nonempty(get_text(one) or "" for one in get_list(tier, name))


def _format_count(value: int | None) -> str:
    return MISSING if value is None else str(value)
