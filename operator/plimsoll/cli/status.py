"""`plimsoll status [NAME]`: how services are, in a line each, or one of them in full. Reads their status alone."""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
import time
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, Final

from plimsoll.adapters.kube import Kube
from plimsoll.cli import cluster, kubeconfig
from plimsoll.cli.files import say
from plimsoll.cli.output import NONE, Screen, age, hanging, listed, table
from plimsoll.cli.reading import entries, items, part, text, whole

Object = dict[str, Any]

# Conditions that are true when things are not as they should be.
_INVERTED: Final = ("Reconciling", "Stalled", "ScalingLimited")
_TIERS: Final = ("prefill", "decode", "serve")
_HEAD: Final = (
    *("NAME", "READY", "PREFILL", "DECODE", "SERVE", "TTFT", "TPOT", "E2E", "ITL"),
    *("ATTAINMENT", "LIMITED-BY", "AGE", "REASON"),
)


def run(arguments: argparse.Namespace) -> int:
    if arguments.name and arguments.all_namespaces:
        arguments.refuse("NAME is of one namespace: -A does not go with it")
    here = None
    if not arguments.all_namespaces:
        here = arguments.namespace or kubeconfig.namespace(arguments.kubeconfig)
    say("\n".join([*asyncio.run(_ask(arguments, here)), ""]))
    return 0


async def _ask(arguments: argparse.Namespace, namespace: str | None) -> list[str]:
    async with cluster.connected(arguments.kubeconfig) as kube:
        return await answer(kube, namespace, arguments.name, Screen.of(sys.stdout), time.time())


async def answer(kube: Kube, namespace: str | None, name: str | None, screen: Screen, now_s: float) -> list[str]:
    """The lines to print. namespace: None for all. now_s: seconds since the epoch. Raises Unanswered."""
    if name is not None and namespace is not None:
        return full(await cluster.service(kube, namespace, name), screen, now_s)
    found = await cluster.services(kube, namespace)
    if not found:
        return [f"no InferenceServices in {f'namespace {namespace}' if namespace else 'any namespace'}"]
    return overview(found, screen, now_s, all_namespaces=namespace is None)


# ---------------------------------------------------------------- all of them


def overview(services: Sequence[Object], screen: Screen, now_s: float, *, all_namespaces: bool) -> list[str]:
    """A table with a line for each service; tiers, times of whole answers and gaps that no service has are left out."""
    rows = [[*_key(one), *_row(one, now_s)] for one in sorted(services, key=_key)]
    columns = ["NAMESPACE", *_HEAD]
    used = [
        place
        for place, title in enumerate(columns)
        if (title != "NAMESPACE" or all_namespaces)
        and (title.lower() not in (*_TIERS, "e2e", "itl") or any(row[place] != NONE for row in rows))
    ]
    alarming = {place for place, row in enumerate(rows, 1) if row[2] == "False"}
    return table([[row[place] for place in used] for row in (columns, *rows)], screen, alarming=alarming)


def _key(service: Object) -> tuple[str, str]:
    return text(service, "metadata", "namespace") or NONE, text(service, "metadata", "name") or NONE


def _row(service: Object, now_s: float) -> Iterable[str]:
    ready = _condition(service, "Ready")
    yield text(ready, "status") or NONE
    for tier in _TIERS:
        yield text(service, "status", "tiers", tier, "summary") or NONE
    for figure in ("ttft", "tpot", "e2e", "itl", "attainment"):
        yield text(service, "status", "slo", figure) or NONE
    yield text(service, "status", "limitedBy") or NONE
    yield _age(text(service, "metadata", "creationTimestamp"), now_s)
    yield text(ready, "reason") or NONE


def _condition(service: Object, kind: str) -> Any:
    return next((one for one in items(service, "status", "conditions") if text(one, "type") == kind), None)


def _age(made: str | None, now_s: float) -> str:
    made_s = _epoch_s(made)
    return NONE if made_s is None else age(now_s - made_s)


def _epoch_s(time: str | None) -> float | None:
    if time is None or not re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", time):
        return None
    try:
        return datetime.fromisoformat(time).timestamp()
    except ValueError:
        return None


# ---------------------------------------------------------------- one in full


def full(service: Object, screen: Screen, now_s: float) -> list[str]:
    """Everything that the status says of one service."""
    names = ", ".join(name for name in items(service, "status", "modelNames") if isinstance(name, str))
    words = listed([text(service, "status", "url") or "no URL yet", f"model {names}" if names else ""])
    lines = hanging(f"{'/'.join(_key(service))}  ", words, screen)
    for section in (_conditions(service, screen), _tiers(service, screen, now_s), _promise(service, screen)):
        lines += ["", *section] if section else []
    return lines + _decisions(service, screen)


def _conditions(service: Object, screen: Screen) -> list[str]:
    found = items(service, "status", "conditions")
    if not found:
        return ["no conditions yet: no operator has looked at it"]
    rows = [[text(one, name) or NONE for name in ("type", "status", "reason", "message")] for one in found]
    bad = {place for place, row in enumerate(rows, 1) if row[1] == ("True" if row[0] in _INVERTED else "False")}
    return table([["CONDITION", "STATUS", "REASON", "MESSAGE"], *rows], screen, alarming=bad)


def _tiers(service: Object, screen: Screen, now_s: float) -> list[str]:
    tiers = {name: tier for name, tier in entries(service, "status", "tiers").items() if entries(tier)}
    if not tiers:
        return []
    return table([_TIER_HEAD, *(_tier(name, tier, now_s) for name, tier in tiers.items())], screen)


_TIER_HEAD: Final = [
    "TIER",
    "READY",
    "STARTING",
    "DESIRED",
    "NEEDED",
    "UTILISATION",
    "KNEE",
    "START-UP P50",
    "P90",
    "MODEL",
]


def _tier(name: str, tier: Any, now_s: float) -> list[str]:
    counts = (whole(tier, field) for field in ("ready", "desired", "needed"))
    figures = (text(tier, *path) for path in (("utilisation",), ("knee",), ("startup", "p50"), ("startup", "p90")))
    ready, *wanted = (NONE if count is None else str(count) for count in counts)
    return [
        name,
        ready,
        _starting(tier, now_s),
        *wanted,
        *(figure or NONE for figure in figures),
        text(tier, "model", "words") or NONE,
    ]


def _starting(tier: Any, now_s: float) -> str:
    """How many come, and when the first of them: `2, next in 24s`, `1 overdue`."""
    count, overdue = whole(tier, "starting", "count"), whole(tier, "starting", "overdue") or 0
    due_s = _epoch_s(text(tier, "starting", "nextReady"))
    if not count:
        return NONE
    told = [f"{count} overdue" if overdue == count else str(count)]
    told += [f"{overdue} overdue"] if 0 < overdue < count else []
    told += [f"next in {age(due_s - now_s)}" if due_s > now_s else "next any moment"] if due_s is not None else []
    return ", ".join(told)


def _promise(service: Object, screen: Screen) -> list[str]:
    slo = entries(service, "spec", "slo")
    if not slo:
        return ["nothing is promised: spec.slo is not set"]
    percentile = part(slo, "percentile")
    measured = entries(service, "status", "slo")
    extra = text(slo, "ttftPerKToken")
    ttft = f"{text(slo, 'ttft') or NONE}{f' + {extra} per 1k tokens' if extra else ''}"
    rows = [[f"P{95 if percentile is None else percentile}", "PROMISED", "MEASURED", "KEPT BY"]]
    for name, target in (("ttft", ttft), ("tpot", text(slo, "tpot")), ("e2e", text(slo, "e2e"))):
        if target or name != "e2e":
            figures = text(measured, name), text(measured, "met", name)
            rows.append([name.upper(), target or NONE, *(figure or NONE for figure in figures)])
    if text(slo, "itl"):
        rows.append(["ITL P99", text(slo, "itl") or NONE, text(measured, "itl") or NONE, NONE])
    return table(rows, screen) + _attained(slo, measured, screen)


def _attained(slo: dict[str, Any], measured: dict[str, Any], screen: Screen) -> list[str]:
    """All targets together: a bound where one of them is timed by the engines and another at the gateway."""
    answered, offered = text(measured, "attainment"), text(measured, "attainmentOffered")
    if answered is None and offered is None:
        why = text(measured, "notKnown")
        return [] if why is None else hanging("", f"how many requests kept all of it is not known: {why}", screen)
    window = text(measured, "window")
    when = f" over the last {window}" if window else ""
    bound = "at least " if text(slo, "tpot") and (text(slo, "ttft") or text(slo, "e2e")) else ""
    kept = f"{bound}{answered or NONE} of the answered and {offered or NONE} of all requests kept all of it{when}"
    return hanging("", kept, screen)


def _decisions(service: Object, screen: Screen) -> list[str]:
    last = part(service, "status", "lastDecision")
    told = [*([last] if entries(last) else []), *items(service, "status", "decisions")]
    rows = [
        [text(one, "time") or NONE, name, f"{_count(tier, 'from')} -> {_count(tier, 'to')}", text(tier, "why") or NONE]
        for one in told
        for name, tier in entries(one, "tiers").items()
    ]
    return ["", *table([["DECIDED", "TIER", "REPLICAS", "WHY"], *rows], screen)] if rows else []


def _count(tier: Any, field: str) -> str:
    count = whole(tier, field)
    return NONE if count is None else str(count)
