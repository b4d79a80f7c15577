"""A gateway's `/signals`, read: what it counted, and which services it can route to.

Problem: the document comes over the network from a pod that may be of an older release, of another fleet that got its
address, or broken; and what is made of it buys and sells GPUs.

Idea: one typed decoder refuses what cannot be: a count that is negative, fractional, NaN or beyond what a double holds
exactly. What a release does not tell yet is None. A document is taken whole or not at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

import msgspec

from plimsoll.core import buckets
from plimsoll.core.ports import Buckets, GatewayReading, Judged, ServiceReading, Taken

ROUTABLE_ROLES = ("decode", "serve")

Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=1e15)]


class Heard(NamedTuple):
    """What one gateway said. synced: it knows what the API server has; before that, what it lacks is not known.

    routable: engines that answer clients and that it can reach, by namespace and name of their service.
    models: the names that it answers to for a service; a service is missing where the gateway's release does not tell.
    """

    synced: bool
    reading: GatewayReading
    routable: Mapping[tuple[str, str], int]
    models: Mapping[tuple[str, str], frozenset[str]] = MappingProxyType({})


class _Endpoint(msgspec.Struct):
    pod: str
    role: str
    routable: bool
    inflight: Count


class _Requests(msgspec.Struct):
    arrived: Count
    retried: Count
    answered: Count
    failed: Count
    cancelled: Count
    refused: dict[str, Count]
    arrived_tokens: Count | None = None  # from version 2 on


class _Histogram(msgspec.Struct):
    sum_s: Seconds
    buckets: list[Count]
    counts: list[Count]


class _Paces(msgspec.Struct):
    targets_s: list[Annotated[float, msgspec.Meta(gt=0.0, le=1e15)]]
    answers: list[Count]


class _Promise(msgspec.Struct):
    judged: Count
    missed: Count
    missed_ttft: Count
    missed_e2e: Count
    tpot: _Paces | None = None  # of version 3, but not of its first gateways


class _Admission(msgspec.Struct):
    held: Count
    held_work_s: Seconds
    in_use: Count
    outcomes: dict[str, Count]
    units: Count = 0
    ticket_work_s: Seconds = 0.0  # of version 3, but not of its first gateways


_NO_ADMISSION = _Admission(0, 0.0, 0, {})


class _Object(msgspec.Struct):
    version: Annotated[str, msgspec.Meta(max_length=300)]
    gated: bool
    unread: Annotated[str, msgspec.Meta(max_length=300)] = ""


class _Service(msgspec.Struct):
    endpoints: list[_Endpoint]
    requests: _Requests
    models: list[str] | None = None
    ttft: _Histogram | None = None  # from version 2 on
    admission: _Admission | None = None  # from version 3 on
    e2e: _Histogram | None = None  # of version 3, but not of its first gateways; readers before that pass over it
    promise: _Promise | None = None  # likewise
    object: _Object | None = None  # likewise


class _Document(msgspec.Struct):
    version: Annotated[int, msgspec.Meta(ge=1, le=3)]
    gateway: str
    synced: bool
    services: dict[str, _Service]
    born: str = ""  # from version 2 on


_decode = msgspec.json.Decoder(_Document).decode


def parse(document: bytes | Mapping[str, Any], gateway: str, at_s: float) -> Heard:
    """Read a document that the pod `gateway` was asked for, at a time of the reader's clock.

    Raises ValueError, in words, for one that is broken, of a version that is not known, or of another pod.
    """
    read = _typed(document)
    if read.gateway != gateway:
        raise ValueError(f"it is that of {read.gateway!r}, not that of {gateway!r}")
    services = {name: _service(name, service) for name, service in read.services.items()}
    routable = {_key(name): _routable(service) for name, service in read.services.items()}
    models = {_key(name): frozenset(s.models) for name, s in read.services.items() if s.models is not None}
    return Heard(read.synced, GatewayReading(gateway, at_s, read.born, services), routable, models)


def _typed(document: bytes | Mapping[str, Any]) -> _Document:
    try:
        return _decode(document) if isinstance(document, bytes) else msgspec.convert(document, _Document)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error


def _key(name: str) -> tuple[str, str]:
    namespace, slash, short = name.partition("/")
    if not (namespace and slash and short) or "/" in short:
        raise ValueError(f"a service is called NAMESPACE/NAME, not {name!r}")
    return namespace, short


def _routable(service: _Service) -> int:
    return sum(e.routable and e.role in ROUTABLE_ROLES for e in service.endpoints)


def _service(name: str, read: _Service) -> ServiceReading:
    requests, admission = read.requests, read.admission or _NO_ADMISSION
    return ServiceReading(
        arrived=requests.arrived,
        arrived_tokens=requests.arrived_tokens,
        retried=requests.retried,
        answered=requests.answered,
        failed=requests.failed,
        cancelled=requests.cancelled,
        refused=requests.refused,
        ttft_s=None if read.ttft is None else _histogram(name, "TTFT", read.ttft),
        e2e_s=None if read.e2e is None else _histogram(name, "e2e", read.e2e),
        judged=None if read.promise is None else _judged(name, read.promise),
        paced=None if read.promise is None or read.promise.tpot is None else _paced(name, read.promise),
        waiting=admission.held,
        held_work_s=admission.held_work_s,
        ticket_work_s=admission.ticket_work_s,
        units=admission.units,
        in_use=admission.in_use,
        outcomes=admission.outcomes,
        inflight={e.pod: e.inflight for e in read.endpoints},
        taken=None if read.object is None else Taken(read.object.version, read.object.gated, read.object.unread),
    )


def _judged(name: str, read: _Promise) -> Judged:
    if not max(read.missed_ttft, read.missed_e2e) <= read.missed <= read.judged:
        raise ValueError(f"more answers of {name} have missed the promise than were held against it")
    return Judged(read.judged, read.missed, read.missed_ttft, read.missed_e2e)


def _paced(name: str, read: _Promise) -> Mapping[float, float]:
    assert read.tpot is not None
    targets_s, answers = read.tpot.targets_s, read.tpot.answers
    if not len(set(targets_s)) == len(targets_s) == len(answers):
        raise ValueError(f"each pace that is promised of {name} must have one count")
    if sum(answers) > read.judged:
        raise ValueError(f"more answers of {name} were promised a pace than were held against a promise")
    return dict(zip(targets_s, map(float, answers), strict=True))


def _histogram(name: str, what: str, read: _Histogram) -> Buckets:
    edges = buckets.LATENCY_EDGES_S
    counts = dict(zip(read.buckets, read.counts, strict=False))
    if not len(counts) == len(read.buckets) == len(read.counts):
        raise ValueError(f"each bucket of the {what} of {name} must have one count")
    if max(counts, default=0) >= len(edges):
        raise ValueError(f"the {what} of {name} has a bucket {max(counts)}, the last is {len(edges) - 1}")
    return buckets.from_sparse(edges, counts, read.sum_s)
