"""The `/signals` document of all services for the operator, and the update of `/metrics`.

The operator polls it from every gateway pod and parses it in `plimsoll.adapters.gateway_signals`. A service is
reachable if one gateway lists a routable endpoint. Its demand is the sum over all gateways.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from plimsoll.core.routing.endpoint import Endpoint
from plimsoll.core.types import Role
from plimsoll.gateway.picker import Picker
from plimsoll.gateway.service_catalog import ServiceEntry
from plimsoll.telemetry import gateway_metrics

SIGNALS_VERSION = 3
MAX_ERROR_LENGTH = 300  # characters of a parse error


def build_signals(
    picker: Picker, gateway: str, *, synced: bool, clock: Callable[[], float] = time.time
) -> dict[str, Any]:
    """Returns the document. Counters start at this picker's start, which `instance_id` identifies.

    - `at`: Unix seconds, for people only.
    - `ttft` and `e2e` (to the last byte of a response): histograms over `LATENCY_EDGES_S`, as the indices and counts
      of the non-empty buckets.
    - `slo`: responses assessed against the SLO of their class, and those that missed any target, TTFT, or e2e.
      `tpot` counts responses by TPOT target, because only engines measure TPOT.
    - `admission`: requests queued now and their work in GPU-seconds; GPU-seconds of retry reservations that are not yet
      due; the largest number of sequences at one engine; this gateway's slots per engine; admission outcomes.
    - `object`: the resource versions of the InferenceService and of its InferenceServiceAdmission, whether admission is
      active, and what cannot be parsed.
    """
    services = {key: _service_signals(picker, service) for key, service in sorted(picker.catalog.services.items())}
    return {
        "version": SIGNALS_VERSION,
        "gateway": gateway,
        "instance_id": picker.instance_id,
        "at": round(clock(), 3),
        "synced": synced,
        "services": services,
    }


def _service_signals(picker: Picker, service: ServiceEntry) -> dict[str, Any]:
    stats = picker.stats(service.key)
    return {
        "models": list(service.names),
        "endpoints": [
            {
                "pod": e.pod,
                "address": e.address,
                "role": e.role,
                "revision": e.revision,
                "routable": is_usable(e),
                "inflight": picker.inflight.carried(e.address),
            }
            for e in service.endpoints
        ],
        **stats.signals(),
        "admission": {
            **picker.admission.signals(service.key),
            "outcomes": {outcome.value: count for outcome, count in stats.admission_outcomes.items()},
        },
        "object": {
            "version": service.resource_version,
            "limits_version": service.limits_version,
            "admission_active": service.key in picker.admission.services,
            "parse_error": service.parse_error[:MAX_ERROR_LENGTH],
        },
    }


def is_usable(endpoint: Endpoint) -> bool:
    """Whether the endpoint can be picked. Envoy does not reach prefill engines: these only need to be available."""
    return endpoint.available and (endpoint.routable or endpoint.role is Role.PREFILL)


def update_metrics(picker: Picker) -> None:
    """Update the metrics just before they are read."""
    pick_s, picker.pick_s = picker.pick_s, 0.0
    gateway_metrics.GATEWAY_PICK_SECONDS.inc(pick_s)
    picker.authenticator.update_metrics()
    for stats in picker.stats_by_service.values():
        stats.update_metrics()
    for key, service in picker.catalog.services.items():
        gateway_metrics.GATEWAY_QUEUED.labels(key).set(picker.admission.signals(key)["queued"])
        step_time_ratio, ttft_residual_s = picker.admission.max_model_error(key)
        gateway_metrics.GATEWAY_STEP_TIME_RATIO.labels(key).set(step_time_ratio)
        gateway_metrics.GATEWAY_TTFT_RESIDUAL.labels(key).set(ttft_residual_s)
        if (slots := picker.admission.adapter_slots(key)) is not None:
            gateway_metrics.GATEWAY_ADAPTERS.labels(key, "active").set(slots.most_active)
            gateway_metrics.GATEWAY_ADAPTERS.labels(key, "waiting").set(slots.waiting)
            gateway_metrics.GATEWAY_ADAPTER_LOAD.labels(key).set(slots.load_s)
        for kind, tokens in asdict(picker.admission.take_prefix_tokens(key)).items():
            gateway_metrics.GATEWAY_PREFIX_TOKENS.labels(key, kind).inc(tokens)
        roles = {e.role for e in service.endpoints}
        inflight: Counter[Role] = Counter()
        endpoint_counts: Counter[tuple[Role, bool]] = Counter()
        for e in service.endpoints:
            inflight[e.role] += picker.inflight.carried(e.address)
            endpoint_counts[e.role, is_usable(e)] += 1
        for role in roles:
            gateway_metrics.GATEWAY_INFLIGHT.labels(key, role.value).set(inflight[role])
            gateway_metrics.GATEWAY_ENDPOINTS.labels(key, role.value, "usable").set(endpoint_counts[role, True])
            gateway_metrics.GATEWAY_ENDPOINTS.labels(key, role.value, "waiting").set(endpoint_counts[role, False])
