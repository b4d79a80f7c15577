"""`/signals`: one compact document of all services for the operator, and what `/metrics` has of the same.

The operator polls it from every gateway pod (`plimsoll.adapters.signals` reads it); a service counts as served when one
of them lists an endpoint as routable, and its demand is what all of them counted.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from plimsoll.core.picking.endpoint import Endpoint, Load, Role
from plimsoll.gateway.endpoints import Service
from plimsoll.gateway.picker import Picker
from plimsoll.telemetry import metrics

VERSION = 3
MOST_WORDS = 300  # of why an object cannot be read
_NOTHING = Load()


def signals(picker: Picker, gateway: str, *, synced: bool, clock: Callable[[], float] = time.time) -> dict[str, Any]:
    """The document. Counts are since this picker's start, which `born` names; `at` (Unix seconds) is for people only.

    `ttft` and `e2e` (to an answer's last byte) are histograms over `LATENCY_EDGES_S`: indices of the buckets that are
    not empty, and the counts in these. `promise`: answers held against the targets of their class, each by the length
    of its prompt, and those of them that missed any, the TTFT, the e2e; `tpot`: how many of them were promised which
    pace, which only engines see.
    `admission`: requests held now and their GPU-seconds; GPU-seconds of those told to come back, until they are due;
    most sequences at one engine, and how many this gateway takes itself to have; outcomes of admission. `object`: what
    of the service's object is gone by: its version, whether requests are let in by the model in it, what of it cannot
    be read, and why.
    """
    services = {key: _service(picker, service) for key, service in sorted(picker.fleet.services.items())}
    return {
        "version": VERSION,
        "gateway": gateway,
        "born": picker.born,
        "at": round(clock(), 3),
        "synced": synced,
        "services": services,
    }


def _service(picker: Picker, service: Service) -> dict[str, Any]:
    loads, tally = picker.inflight.loads, picker.tally(service.key)
    return {
        "models": list(service.names),
        "endpoints": [
            {
                "pod": e.pod,
                "address": e.address,
                "role": e.role,
                "revision": e.revision,
                "routable": usable(e),
                "inflight": loads.get(e.address, _NOTHING).inflight,
            }
            for e in service.endpoints
        ],
        **tally.signals(),
        "admission": {
            **picker.admission.signals(service.key),
            "outcomes": {outcome.value: count for outcome, count in tally.decided.items()},
        },
        "object": {
            "version": service.version,
            "gated": service.key in picker.admission.guards,
            "unread": service.unread[:MOST_WORDS],
        },
    }


def usable(endpoint: Endpoint) -> bool:
    """Would it be picked? Prefill engines are not reached through Envoy: for them, being live is enough."""
    return endpoint.live and (endpoint.routable or endpoint.role is Role.PREFILL)


def show_metrics(picker: Picker) -> None:
    """Bring the metrics in line with counts and state, just before they are read."""
    for tally in picker.tallies.values():
        tally.show()
    for key, service in picker.fleet.services.items():
        metrics.GATEWAY_HELD.labels(key).set(picker.admission.signals(key)["held"])
        pace, unseen_s = picker.admission.learned(key)
        metrics.GATEWAY_PACE.labels(key).set(pace)
        metrics.GATEWAY_UNSEEN.labels(key).set(unseen_s)
        roles = {e.role for e in service.endpoints}
        held: Counter[Role] = Counter()
        able: Counter[tuple[Role, bool]] = Counter()
        for e in service.endpoints:
            held[e.role] += picker.inflight.loads.get(e.address, _NOTHING).inflight
            able[e.role, usable(e)] += 1
        for role in roles:
            metrics.GATEWAY_INFLIGHT.labels(key, role.value).set(held[role])
            metrics.GATEWAY_ENDPOINTS.labels(key, role.value, "usable").set(able[role, True])
            metrics.GATEWAY_ENDPOINTS.labels(key, role.value, "waiting").set(able[role, False])
