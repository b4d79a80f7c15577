"""`plimsoll top`: a table of services with their load, latencies, KV cache and queue, again and again in a terminal.

The services come from the API server, and the load from the leading operator's documents, as for `explain`. Without
permission to read those, the table has the figures of the status, and a line says what is missing.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

from plimsoll.adapters.kube_client import KubeClient
from plimsoll.cli import cluster, kubeconfig
from plimsoll.cli.json_access import get_list, get_mapping, get_number, get_text
from plimsoll.cli.output import MISSING, Screen, format_table, hanging_indent
from plimsoll.cli.output_files import print_text
from plimsoll.cli.status import used_share
from plimsoll.core.errors import PlimsollError
from plimsoll.core.types import Role
from plimsoll.core.units import format_figure, format_number

KubeObject = dict[str, Any]

MIN_INTERVAL_S: Final = 1.0  # a shorter one would load the API server for nothing: the operator decides once a second
_CLEAR: Final = "\x1b[H\x1b[J"
_HEADER: Final = ("NAMESPACE", "NAME", "READY", "REPLICAS", "REQ/S", "QUEUED", "RUNNING", "REJECTED", "KV")
_STATUS_HEADER: Final = ("TTFT", "TPOT", "ATTAINMENT", "UTILIZATION")


def run(arguments: argparse.Namespace) -> int:
    if not arguments.interval >= MIN_INTERVAL_S:
        arguments.refuse(f"--interval must be at least {MIN_INTERVAL_S:.0f} s, not {format_number(arguments.interval)}")
    namespace = None
    if not arguments.all_namespaces:
        namespace = arguments.namespace or kubeconfig.current_namespace(arguments.kubeconfig)
    asyncio.run(_show(arguments, namespace))
    return 0


async def _show(arguments: argparse.Namespace, namespace: str | None) -> None:
    async with cluster.connect(arguments.kubeconfig) as kube:
        is_live = sys.stdout.isatty() and not arguments.once

        async def table() -> list[str]:
            return await top_lines(kube, namespace, arguments.operator_namespace, Screen.for_stream(sys.stdout))

        if not is_live:
            print_text("\n".join([*await table(), ""]))
            return
        await refresh(table, print_text, lambda: asyncio.sleep(arguments.interval))


async def refresh(table: Callable[[], Any], write: Callable[[str], None], pause: Callable[[], Any]) -> None:
    """Write the table again after each pause, until the pause or the writer raises.

    A failed read is shown in place of the table, and the next one tries again; the first one is raised.
    """
    lines = await table()
    while True:
        write(_CLEAR + "\n".join([*lines, ""]))
        await pause()
        try:
            lines = await table()
        except PlimsollError as error:
            lines = [str(error)]


async def top_lines(kube: KubeClient, namespace: str | None, operator_namespace: str, screen: Screen) -> list[str]:
    """Return the lines of one table. namespace: None for all. Raises ClusterQueryError."""
    services = sorted(await cluster.list_services(kube, namespace), key=_key)
    if not services:
        return [f"no InferenceServices in {f'namespace {namespace}' if namespace else 'any namespace'}"]
    documents: dict[tuple[str, str], Any] = {}
    note = ""
    try:
        leader = await cluster.find_leader(kube, operator_namespace)
        documents = await cluster.get_documents(kube, leader, operator_namespace, [_key(one) for one in services])
    except PlimsollError as error:
        note = f"no figures of the operator: {error}"
    if not note and len(services) > cluster.MAX_DOCUMENTS:
        note = f"figures of the first {cluster.MAX_DOCUMENTS} of {len(services)} services; choose a namespace with -n"
    rows = [_row(one, documents.get(_key(one))) for one in services]
    first = 0 if namespace is None else 1
    alarming = {place for place, row in enumerate(rows, 1) if row[2] == "False"}
    table = format_table([row[first:] for row in ([*_HEADER, *_STATUS_HEADER], *rows)], screen, alarm_rows=alarming)
    return [*table, *(hanging_indent("", note, screen) if note else [])]


def _key(service: KubeObject) -> tuple[str, str]:
    return get_text(service, "metadata", "namespace") or MISSING, get_text(service, "metadata", "name") or MISSING


def _row(service: KubeObject, document: Any) -> list[str]:
    ready = next((one for one in get_list(service, "status", "conditions") if get_text(one, "type") == "Ready"), None)
    metrics = get_mapping(document, "metrics")
    tiers = get_mapping(metrics, "tiers")
    rejected, rate = (get_number(metrics, "gateways", name) for name in ("rejected_share", "rate_per_s"))
    return [
        *_key(service),
        get_text(ready, "status") or MISSING,
        _by_tier(service, "summary"),
        MISSING if rate is None else format_figure(rate),
        _count(get_number(metrics, "gateways", "queued")),
        _count(sum(running) if (running := _known([get_number(tier, "running") for tier in tiers.values()])) else None),
        _share(rejected),
        _share(max(_known([get_number(tier, "kv_used") for tier in tiers.values()]), default=None)),
        *(get_text(service, "status", "slo", name) or MISSING for name in ("ttft", "tpot", "attainment")),
        _by_tier(service, "capacityPerReplica", used_share),
    ]


def _by_tier(service: KubeObject, name: str, part: Callable[[str], str] = str) -> str:
    """One figure of each tier, such as `1/1 3/5` of prefill and decode. part: what to show of the field."""
    found = [get_text(service, "status", "tiers", tier, name) for tier in Role]
    return " ".join(filter(None, (part(text) for text in found if text))) or MISSING


def _known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _count(value: float | None) -> str:
    return MISSING if value is None else f"{value:.0f}"


def _share(value: float | None) -> str:
    return MISSING if value is None else f"{value:.0%}"
