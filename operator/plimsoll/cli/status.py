"""`plimsoll status [NAME]`: a table of services, or the details of one. It reads only InferenceService objects."""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
import time
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, Final

from plimsoll.adapters.kube_client import KubeClient
from plimsoll.api.conditions import ABNORMAL_TRUE
from plimsoll.api.starting_pods import parse_starting
from plimsoll.cli import cluster, kubeconfig
from plimsoll.cli.json_access import get_int, get_list, get_mapping, get_text, get_value
from plimsoll.cli.output import MISSING, Screen, format_age, format_table, hanging_indent, join_nonempty
from plimsoll.cli.output_files import print_text
from plimsoll.core.types import Role

KubeObject = dict[str, Any]

_HEADER: Final = (
    *("NAME", "READY", "PREFILL", "DECODE", "SERVE", "TTFT", "TPOT", "E2E", "ITL"),
    *("ATTAINMENT", "LIMITED-BY", "AGE", "REASON"),
)


def run(arguments: argparse.Namespace) -> int:
    if arguments.name and arguments.all_namespaces:
        arguments.refuse("NAME and --all-namespaces are mutually exclusive")
    namespace = None
    if not arguments.all_namespaces:
        namespace = arguments.namespace or kubeconfig.current_namespace(arguments.kubeconfig)
    print_text("\n".join([*asyncio.run(_fetch(arguments, namespace)), ""]))
    return 0


async def _fetch(arguments: argparse.Namespace, namespace: str | None) -> list[str]:
    async with cluster.connect(arguments.kubeconfig) as kube:
        return await status_lines(kube, namespace, arguments.name, Screen.for_stream(sys.stdout), time.time())


async def status_lines(
    kube: KubeClient, namespace: str | None, name: str | None, screen: Screen, now_s: float
) -> list[str]:
    """Return the lines to print. namespace: None for all. now_s: seconds since the epoch. Raises ClusterQueryError."""
    if name is not None and namespace is not None:
        return service_detail(await cluster.get_service(kube, namespace, name), screen, now_s)
    services = await cluster.list_services(kube, namespace)
    if not services:
        return [f"no InferenceServices in {f'namespace {namespace}' if namespace else 'any namespace'}"]
    return services_table(services, screen, now_s, all_namespaces=namespace is None)


# ---------------------------------------------------------------- table of services


def services_table(services: Sequence[KubeObject], screen: Screen, now_s: float, *, all_namespaces: bool) -> list[str]:
    """Return a table with one line per service, without tier, E2E and ITL columns that are empty."""
    rows = [[*_namespace_and_name(one), *_row(one, now_s)] for one in sorted(services, key=_namespace_and_name)]
    columns = ["NAMESPACE", *_HEADER]
    used_columns = [
        place
        for place, title in enumerate(columns)
        if (title != "NAMESPACE" or all_namespaces)
        and (title.lower() not in (*Role, "e2e", "itl") or any(row[place] != MISSING for row in rows))
    ]
    alarming = {place for place, row in enumerate(rows, 1) if row[2] == "False"}
    return format_table(
        [[row[place] for place in used_columns] for row in (columns, *rows)], screen, alarm_rows=alarming
    )


def _namespace_and_name(service: KubeObject) -> tuple[str, str]:
    return get_text(service, "metadata", "namespace") or MISSING, get_text(service, "metadata", "name") or MISSING


def _row(service: KubeObject, now_s: float) -> Iterable[str]:
    ready = _condition(service, "Ready")
    yield get_text(ready, "status") or MISSING
    for tier in Role:
        yield get_text(service, "status", "tiers", tier, "summary") or MISSING
    for figure in ("ttft", "tpot", "e2e", "itl", "attainment"):
        yield get_text(service, "status", "slo", figure) or MISSING
    yield get_text(service, "status", "limitedBy") or MISSING
    yield _format_age(get_text(service, "metadata", "creationTimestamp"), now_s)
    yield get_text(ready, "reason") or MISSING


def _condition(service: KubeObject, kind: str) -> Any:
    return next((one for one in get_list(service, "status", "conditions") if get_text(one, "type") == kind), None)


def _format_age(created: str | None, now_s: float) -> str:
    created_s = _epoch_s(created)
    return MISSING if created_s is None else format_age(now_s - created_s)


def _epoch_s(time: str | None) -> float | None:
    if time is None or not re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", time):
        return None
    try:
        return datetime.fromisoformat(time).timestamp()
    except ValueError:
        return None


# ---------------------------------------------------------------- details of one service


def _no_url(service: KubeObject) -> str:
    targets = get_mapping(service, "spec", "targets")
    is_routed = not targets or get_int(targets, "serve", "port") is not None
    return "no URL yet" if is_routed else "no URL: requests do not pass gateways"


def service_detail(service: KubeObject, screen: Screen, now_s: float) -> list[str]:
    """Return all details of one service's status."""
    names = ", ".join(name for name in get_list(service, "status", "modelNames") if isinstance(name, str))
    summary = join_nonempty([get_text(service, "status", "url") or _no_url(service), f"model {names}" if names else ""])
    lines = hanging_indent(f"{'/'.join(_namespace_and_name(service))}  ", summary, screen)
    for section in (
        _conditions_section(service, screen),
        _tiers_section(service, screen, now_s),
        _tuning_section(service, screen),
        _draft_section(service, screen),
        _model_section(service, screen),
        _slo_section(service, screen),
    ):
        lines += ["", *section] if section else []
    return lines


def _conditions_section(service: KubeObject, screen: Screen) -> list[str]:
    conditions = get_list(service, "status", "conditions")
    if not conditions:
        return ["no conditions yet: the operator has not reconciled the service"]
    rows = [[get_text(one, name) or MISSING for name in ("type", "status", "reason", "message")] for one in conditions]
    alarm_rows = {
        place for place, row in enumerate(rows, 1) if row[1] == ("True" if row[0] in ABNORMAL_TRUE else "False")
    }
    return format_table([["CONDITION", "STATUS", "REASON", "MESSAGE"], *rows], screen, alarm_rows=alarm_rows)


def _tiers_section(service: KubeObject, screen: Screen, now_s: float) -> list[str]:
    tiers = {name: tier for name, tier in get_mapping(service, "status", "tiers").items() if get_mapping(tier)}
    if not tiers:
        return []
    return format_table([_TIER_HEADER, *(_tier_row(name, tier, now_s) for name, tier in tiers.items())], screen)


def _tuning_section(service: KubeObject, screen: Screen) -> list[str]:
    tuning = get_text(service, "status", "engineTuning")
    return hanging_indent("engine arguments  ", tuning, screen) if tuning else []


def _draft_section(service: KubeObject, screen: Screen) -> list[str]:
    tiers = get_mapping(service, "status", "tiers")
    shares = [f"{name} {share}" for name, tier in tiers.items() if (share := get_text(tier, "draftAcceptance"))]
    return hanging_indent("accepted drafts  ", ", ".join(shares), screen) if shares else []


def _model_section(service: KubeObject, screen: Screen) -> list[str]:
    revision = get_text(service, "status", "modelRevision")
    return hanging_indent("model revision  ", revision, screen) if revision else []


_TIER_HEADER: Final = [
    "TIER",
    "READY",
    "STARTING",
    "DESIRED",
    "NEEDED",
    "UTILIZATION",
    "CAPACITY",
]


def _tier_row(name: str, tier: Any, now_s: float) -> list[str]:
    ready, _, desired = (get_text(tier, "summary") or "").partition("/")
    capacity, needed = get_text(tier, "capacityPerReplica") or "", get_int(tier, "needed")
    required = (desired if capacity else "") if needed is None else str(needed)
    cells = ready, _starting_summary(tier, now_s), desired, required, used_share(capacity), capacity.partition(", ")[0]
    return [name, *(cell or MISSING for cell in cells)]


def used_share(capacity: str) -> str:
    """The share in a text such as `9.1 req/s, 70% used`; "" if it has none."""
    return capacity.partition(", ")[2].removesuffix(" used")


def _starting_summary(tier: Any, now_s: float) -> str:
    """Return the number of starting pods and the next expected time, such as `2, next in 24s` or `1 overdue`."""
    starting = parse_starting(get_text(tier, "startingPods"))
    if starting is None or not starting.total:
        return MISSING
    count, overdue, due_s = starting.total, starting.overdue, _epoch_s(starting.next_ready)
    parts = [f"{count} overdue" if overdue == count else str(count)]
    parts += [f"{overdue} overdue"] if 0 < overdue < count else []
    parts += [f"next in {format_age(due_s - now_s)}" if due_s > now_s else "next now"] if due_s is not None else []
    return ", ".join(parts)


def _slo_section(service: KubeObject, screen: Screen) -> list[str]:
    slo = get_mapping(service, "spec", "slo")
    if not slo:
        return ["no SLO: spec.slo is not set"]
    percentile = get_value(slo, "percentile")
    measured = get_mapping(service, "status", "slo")
    extra = get_text(slo, "ttftPerKToken")
    ttft = f"{get_text(slo, 'ttft') or MISSING}{f' + {extra} per 1k tokens' if extra else ''}"
    rows = [[f"P{95 if percentile is None else percentile}", "TARGET", "MEASURED"]]
    for name, target in (("ttft", ttft), ("tpot", get_text(slo, "tpot")), ("e2e", get_text(slo, "e2e"))):
        if target or name != "e2e":
            rows.append([name.upper(), target or MISSING, get_text(measured, name) or MISSING])
    if get_text(slo, "itl"):
        rows.append(["ITL P99", get_text(slo, "itl") or MISSING, get_text(measured, "itl") or MISSING])
    return format_table(rows, screen) + _attainment_lines(slo, measured, screen)


def _attainment_lines(slo: dict[str, Any], measured: dict[str, Any], screen: Screen) -> list[str]:
    """Return the attainment of all targets together.

    It is a lower bound if engines measure one target and gateways another.
    """
    of_completed = get_text(measured, "attainment")
    of_all = get_text(measured, "attainmentIncludingRejected") or of_completed
    if of_completed is None and of_all is None:
        why = get_text(measured, "unavailableReason")
        return [] if why is None else hanging_indent("", f"attainment unknown: {why}", screen)
    bound = "at least " if get_text(slo, "tpot") and (get_text(slo, "ttft") or get_text(slo, "e2e")) else ""
    sentence = (
        f"{bound}{of_completed or MISSING} of the completed and {of_all or MISSING} of all requests of the last minute"
        " met the SLO"
    )
    return hanging_indent("", sentence, screen)
