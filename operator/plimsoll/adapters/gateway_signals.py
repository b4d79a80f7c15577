"""Parses a gateway's `/signals`: its request counters, and the services it can route to.

Problem: the document comes over the network from a pod that may be broken, of an older release, or of another fleet
that reused its address. Scaling decisions are based on it.

Idea: one typed decoder rejects impossible values: counts that are negative, fractional, NaN or too large for an exact
double. A field that a release does not report yet is None. A document is accepted as a whole or not at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

import msgspec

from plimsoll.core import histogram
from plimsoll.core.ports import BucketCounts, GatewayConfigState, GatewayReading, ServiceReading, SloCounts

ROUTABLE_ROLES = ("decode", "serve")

CountField = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
SecondsField = Annotated[float, msgspec.Meta(ge=0.0, le=1e15)]


class GatewaySignals(NamedTuple):
    """One gateway's signals.

    synced: its caches are complete; until then a missing object has no meaning. routable_endpoints: number of reachable
    engines that answer clients, by namespace and name of their service. models: model names that it accepts, by
    service; a service is missing if the gateway's release does not report them.
    """

    synced: bool
    reading: GatewayReading
    routable_endpoints: Mapping[tuple[str, str], int]
    models: Mapping[tuple[str, str], frozenset[str]] = MappingProxyType({})


class _EndpointRecord(msgspec.Struct):
    pod: str
    role: str
    routable: bool
    inflight: CountField


class _RequestsRecord(msgspec.Struct):
    arrived: CountField
    retried: CountField
    succeeded: CountField
    failed: CountField
    cancelled: CountField
    rejected: dict[str, CountField]
    arrived_tokens: CountField | None = None  # from version 2 on
    arrived_media_tokens: dict[str, CountField] = {}  # of version 3, but not of its first gateways
    arrived_by_class: dict[str, CountField] = {}  # likewise


class _HistogramRecord(msgspec.Struct):
    sum_s: SecondsField
    buckets: list[CountField]
    counts: list[CountField]


class _TpotTargetsRecord(msgspec.Struct):
    targets_s: list[Annotated[float, msgspec.Meta(gt=0.0, le=1e15)]]
    counts: list[CountField]


class _SloCountsRecord(msgspec.Struct):
    assessed: CountField
    missed: CountField
    missed_ttft: CountField
    missed_e2e: CountField
    tpot: _TpotTargetsRecord | None = None  # of version 3, but not of its first gateways


class _AdmissionRecord(msgspec.Struct):
    queued: CountField
    queued_work_s: SecondsField
    in_use: CountField
    outcomes: dict[str, CountField]
    slots: CountField = 0
    reserved_work_s: SecondsField = 0.0  # of version 3, but not of its first gateways


_NO_ADMISSION = _AdmissionRecord(0, 0.0, 0, {})


class _ConfigStateRecord(msgspec.Struct):
    version: Annotated[str, msgspec.Meta(max_length=300)]
    admission_active: bool
    parse_error: Annotated[str, msgspec.Meta(max_length=300)] = ""
    limits_version: Annotated[str, msgspec.Meta(max_length=300)] | None = None  # of version 3, but not of its first


class _ServiceRecord(msgspec.Struct):
    endpoints: list[_EndpointRecord]
    requests: _RequestsRecord
    models: list[str] | None = None
    ttft: _HistogramRecord | None = None  # from version 2 on
    admission: _AdmissionRecord | None = None  # from version 3 on
    e2e: _HistogramRecord | None = None  # of version 3, but not of its first gateways; older readers ignore it
    slo: _SloCountsRecord | None = None  # likewise
    object: _ConfigStateRecord | None = None  # likewise


class _SignalsDocument(msgspec.Struct):
    version: Annotated[int, msgspec.Meta(ge=1, le=3)]
    gateway: str
    synced: bool
    services: dict[str, _ServiceRecord]
    instance_id: str = ""  # from version 2 on


_decode = msgspec.json.Decoder(_SignalsDocument).decode


def parse_signals(raw: bytes | Mapping[str, Any], gateway: str, at_s: float) -> GatewaySignals:
    """Parse the document of the pod `gateway`, received at `at_s` of the reader's clock.

    Raises ValueError for a malformed document, an unknown version, or the document of another pod.
    """
    document = _decode_document(raw)
    if document.gateway != gateway:
        raise ValueError(f"the document is from gateway {document.gateway!r}, not from {gateway!r}")
    services = {name: _service_reading(name, service) for name, service in document.services.items()}
    routable = {_service_key(name): _routable_count(service) for name, service in document.services.items()}
    models = {_service_key(name): frozenset(s.models) for name, s in document.services.items() if s.models is not None}
    return GatewaySignals(
        document.synced, GatewayReading(gateway, at_s, document.instance_id, services), routable, models
    )


def _decode_document(raw: bytes | Mapping[str, Any]) -> _SignalsDocument:
    try:
        return _decode(raw) if isinstance(raw, bytes) else msgspec.convert(raw, _SignalsDocument)
    except RecursionError as error:
        raise ValueError("the document is nested too deeply") from error


def _service_key(name: str) -> tuple[str, str]:
    namespace, slash, short = name.partition("/")
    if not (namespace and slash and short) or "/" in short:
        raise ValueError(f"service names have the form NAMESPACE/NAME, not {name!r}")
    return namespace, short


def _routable_count(service: _ServiceRecord) -> int:
    return sum(e.routable and e.role in ROUTABLE_ROLES for e in service.endpoints)


def _service_reading(name: str, record: _ServiceRecord) -> ServiceReading:
    requests, admission = record.requests, record.admission or _NO_ADMISSION
    return ServiceReading(
        arrived=requests.arrived,
        arrived_tokens=requests.arrived_tokens,
        arrived_media_tokens=requests.arrived_media_tokens,
        arrived_by_class=requests.arrived_by_class,
        retried=requests.retried,
        succeeded=requests.succeeded,
        failed=requests.failed,
        cancelled=requests.cancelled,
        rejected=requests.rejected,
        ttft_s=None if record.ttft is None else _histogram(name, "TTFT", record.ttft),
        e2e_s=None if record.e2e is None else _histogram(name, "e2e", record.e2e),
        slo_counts=None if record.slo is None else _slo_counts(name, record.slo),
        by_tpot_target=None
        if record.slo is None or record.slo.tpot is None
        else _requests_by_tpot_target(name, record.slo),
        queued=admission.queued,
        queued_work_s=admission.queued_work_s,
        reserved_work_s=admission.reserved_work_s,
        slot_limit=admission.slots,
        slots_in_use=admission.in_use,
        outcomes=admission.outcomes,
        inflight={e.pod: e.inflight for e in record.endpoints},
        config_state=None
        if record.object is None
        else GatewayConfigState(
            record.object.version,
            record.object.admission_active,
            record.object.parse_error,
            record.object.limits_version,
        ),
    )


def _slo_counts(name: str, record: _SloCountsRecord) -> SloCounts:
    if not max(record.missed_ttft, record.missed_e2e) <= record.missed <= record.assessed:
        raise ValueError(f"{name} has more SLO misses than assessed requests, or a target has more than all together")
    return SloCounts(record.assessed, record.missed, record.missed_ttft, record.missed_e2e)


def _requests_by_tpot_target(name: str, record: _SloCountsRecord) -> Mapping[float, float]:
    assert record.tpot is not None
    targets_s, counts = record.tpot.targets_s, record.tpot.counts
    if not len(set(targets_s)) == len(targets_s) == len(counts):
        raise ValueError(f"each TPOT target of {name} must have one count")
    if sum(counts) > record.assessed:
        raise ValueError(f"{name} has more requests with a TPOT target than assessed requests")
    return dict(zip(targets_s, map(float, counts), strict=True))


def _histogram(name: str, metric: str, record: _HistogramRecord) -> BucketCounts:
    edges = histogram.LATENCY_EDGES_S
    counts = dict(zip(record.buckets, record.counts, strict=False))
    if not len(counts) == len(record.buckets) == len(record.counts):
        raise ValueError(f"each bucket of the {metric} of {name} must have one count")
    if max(counts, default=0) >= len(edges):
        raise ValueError(f"the {metric} of {name} has a bucket {max(counts)}, the last is {len(edges) - 1}")
    return histogram.from_sparse(edges, counts, record.sum_s)
