"""Reconcile the picker's in-flight counts with those that Envoy reports.

The picker counts up at a pick and down at the access-log record. Both are slightly out of sync with Envoy, and records
can be lost. A difference in one poll may be a request in transit. If it persists in the next poll, it is an error.
"""

from __future__ import annotations


def reconcile_inflight(previous_drift: int | None, drift: int) -> int:
    """Returns the correction of the picker's count, from the last two differences (Envoy's count minus the picker's).

    If `previous_drift` is None, there was no earlier poll and the current difference is the correction.
    """
    if previous_drift is None:
        return drift
    if previous_drift > 0 and drift > 0:
        return min(previous_drift, drift)
    if previous_drift < 0 and drift < 0:
        return max(previous_drift, drift)
    return 0
