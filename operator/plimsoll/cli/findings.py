"""Findings of `doctor` and `check`: a problem or a remark, with its remedy, and reads without permission."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from plimsoll.adapters.kube_client import KubeClient, Resource
from plimsoll.cli.output import Screen, format_table, hanging_indent
from plimsoll.cli.output_files import print_text
from plimsoll.core.errors import ClusterError, Forbidden, NotFound

KubeObject = dict[str, Any]

PROBLEM: Final = "problem"
NOTE: Final = "note"
UNCHECKED: Final = "unchecked"
NODES: Final = Resource("", "v1", "nodes", "Node", namespaced=False)


@dataclass(frozen=True)
class Finding:
    """One finding. level: PROBLEM, NOTE or UNCHECKED. remedy: what to do, "" if there is nothing to do."""

    level: str
    subject: str
    message: str
    remedy: str = ""


async def read_all(
    kube: KubeClient, resource: Resource, namespace: str | None, findings: list[Finding], selector: str | None = None
) -> list[KubeObject] | None:
    """Return the objects of a kind; None, with an entry in `findings`, if they cannot be read.

    namespace: None for all. A kind that the cluster does not have has no objects.
    """
    scope = f"in namespace {namespace}" if namespace else "in the whole cluster"
    try:
        return (await kube.list(resource, namespace, selector))[0]
    except NotFound:
        return []
    except Forbidden:
        remedy = f"ask for permission to list {resource.plural}{f'.{resource.group}' if resource.group else ''} {scope}"
        findings.append(Finding(UNCHECKED, resource.plural, f"forbidden: cannot list {resource.plural}", remedy))
    except ClusterError as error:
        findings.append(Finding(UNCHECKED, resource.plural, f"cannot list {resource.plural}: {error}", "try again"))
    return None


def print_findings(subject: str, findings: Sequence[Finding], *, as_json: bool) -> int:
    """Print the findings about a subject, as a table or as JSON. Returns the exit status."""
    problems = sum(one.level == PROBLEM for one in findings)
    if as_json:
        listed = [asdict(one) for one in _ordered(findings)]
        print_text(json.dumps({"subject": subject, "problems": problems, "findings": listed}, indent=2) + "\n")
        return exit_status(findings)
    screen = Screen.for_stream(sys.stdout)
    unread = sum(one.level == UNCHECKED for one in findings)
    heading = (
        f"{subject}: {f'{problems} to mend' if problems else 'no problem'}{f', {unread} not checked' if unread else ''}"
    )
    print_text("\n".join([*hanging_indent("", heading, screen), *findings_lines(findings, screen), ""]))
    return exit_status(findings)


def findings_lines(findings: Sequence[Finding], screen: Screen) -> list[str]:
    """Return the findings as a table, problems first."""
    rows = [[one.level, one.subject, _sentence(one)] for one in _ordered(findings)]
    alarming = {place for place, row in enumerate(rows) if row[0] == PROBLEM}
    return format_table(rows, screen, head=False, alarm_rows=alarming)


def exit_status(findings: Sequence[Finding]) -> int:
    """Return 1 if there is a problem, else 0."""
    return int(any(one.level == PROBLEM for one in findings))


def _ordered(findings: Sequence[Finding]) -> list[Finding]:
    order = (PROBLEM, NOTE, UNCHECKED)
    return sorted(findings, key=lambda one: order.index(one.level))


def _sentence(finding: Finding) -> str:
    return f"{finding.message} -> {finding.remedy}" if finding.remedy else finding.message
