"""`status.adapters` and the condition AdapterFailed, from what the engines report. Pure.

Problem: 256 adapters on 1000 engines are more than a status may hold, and a status that is too large is no status.
Idea: an entry has counts, and the names of pods and the errors are bounded for all adapters together. An error stays
until an engine has loaded the adapter: one that restarts, or that tries again, has not mended it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from plimsoll.adapters.launcher import AdapterReport
from plimsoll.api.conditions import Condition, ConditionReason, ConditionType
from plimsoll.api.message_text import shorten
from plimsoll.api.v1alpha1.status import MAX_NOT_LOADED_ON
from plimsoll.engines.redaction import redact

Object = dict[str, Any]

MAX_PODS: Final = 64  # names of pods in the entries of one service
MAX_ERRORS: Final = 16  # errors in the entries of one service
MAX_ERROR_CHARS: Final = 256
MAX_NAME_CHARS, MAX_BRIEF_CHARS = 60, 120  # in an Event


ReportsByPod = Mapping[str, Mapping[str, AdapterReport]]  # by pod and adapter, of ready pods


def adapters_status(entries: Sequence[Object], reports: ReportsByPod, *, has_engines: bool) -> list[Object]:
    """The entries of the adapters in the spec; `entries` are those before, with names and grants.

    has_engines: whether an engine is ready. While none of those has reported, as after a restart of the operator, the
    entries stay as they are.
    """
    if has_engines and not reports:
        return list(entries)
    pods_left, errors_left = MAX_PODS, MAX_ERRORS
    stated = []
    for entry in entries:
        name = entry["name"]
        missing = sorted(pod for pod, found in reports.items() if not _is_loaded(found.get(name)))
        is_loaded = len(missing) < len(reports)
        error = _first_error(name, reports) or ("" if is_loaded else str(entry.get("error", "")))
        stated_adapter: Object = {key: entry[key] for key in ("name", "since") if key in entry}
        stated_adapter["loaded"] = f"{len(reports) - len(missing)}/{len(reports)}"
        if error and errors_left:
            stated_adapter["error"], errors_left = shorten(redact(error), MAX_ERROR_CHARS), errors_left - 1
        if listed := missing[: min(MAX_NOT_LOADED_ON, pods_left)]:
            stated_adapter["notLoadedOn"], pods_left = listed, pods_left - len(listed)
        stated.append(stated_adapter)
    return stated


def adapter_failed(
    names: Sequence[str], reports: ReportsByPod, stored: Sequence[Object] = (), entries: Sequence[Object] = ()
) -> Condition | None:
    """The condition of a service with adapters that an engine cannot load.

    stored, entries: the conditions and `status.adapters` before. The condition stays while there is no report, and
    while an adapter that failed is loaded by no engine.
    """
    failing = [name for name in names if _first_error(name, reports)]
    if not failing:
        failed = {entry["name"] for entry in entries if entry.get("error")} & {*names}
        is_open = any(not any(_is_loaded(found.get(name)) for found in reports.values()) for name in failed)
        before = next((one for one in stored if one.get("type") == ConditionType.ADAPTER_FAILED), None)
        words = "" if before is None else str(before.get("message", ""))
        if words and names and (is_open or not reports):
            return Condition(ConditionType.ADAPTER_FAILED, True, ConditionReason.ADAPTER_FAILED, words)
        return None
    name, others = failing[0], len(failing) - 1
    pods = [pod for pod in sorted(reports) if name in reports[pod] and reports[pod][name].error]
    error = redact(_first_error(name, reports))
    more = f"; {others} more in status.adapters" if others else ""
    message = f"spec.adapters {name} is not loaded by {len(pods)} of {len(reports)} engines: {pods[0]}: {error}{more}"
    brief = f"adapter {shorten(name, MAX_NAME_CHARS)} cannot be loaded: {shorten(error, MAX_BRIEF_CHARS)}{more}"
    return Condition(ConditionType.ADAPTER_FAILED, True, ConditionReason.ADAPTER_FAILED, message, brief)


def _is_loaded(report: AdapterReport | None) -> bool:
    return report is not None and report.loaded


def _first_error(name: str, reports: ReportsByPod) -> str:
    """The error of the first pod that has one."""
    errors = (reports[pod][name].error for pod in sorted(reports) if name in reports[pod])
    return next(filter(None, errors), "")
