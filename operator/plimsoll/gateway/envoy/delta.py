"""The server's side of one incremental discovery stream (delta xDS), without I/O.

Envoy names what it has, what it subscribes to, and which responses it has applied. The stream computes what it lacks.

Two rules of the protocol are easy to miss. A cluster that is new or changed waits for its endpoints, and Envoy asks for
them again only if no other cluster has them already: so endpoints are sent after each cluster that needs them. And a
name that is subscribed to again is sent again, even if Envoy has that version.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from envoy.service.discovery.v3.discovery_pb2 import DeltaDiscoveryResponse

from plimsoll.gateway.envoy.tls import CERTIFICATE, ENGINE_AUTHORITY, ENGINE_CERTIFICATE
from plimsoll.gateway.envoy.xds import (
    CLUSTER_TYPE,
    ENDPOINTS_TYPE,
    RUNTIME_TYPE,
    SECRET_TYPE,
    XdsResource,
    XdsSnapshot,
)

log = logging.getLogger(__name__)

_SEND_ORDER = (CLUSTER_TYPE, ENDPOINTS_TYPE, RUNTIME_TYPE, SECRET_TYPE)
_SECRETS = (CERTIFICATE, ENGINE_CERTIFICATE, ENGINE_AUTHORITY)
_WILDCARD = "*"


@dataclass(slots=True)
class _TypeState:
    """What Envoy has of one type. `versions` include those that are sent but not yet applied; "" is an absent one."""

    is_wildcard: bool = False
    subscribed: set[str] = field(default_factory=set)
    versions: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AppliedEndpoints:
    """Addresses that Envoy knows from now on, by service key.

    `is_new_envoy` is true if this Envoy has just started and knows no others.
    """

    addresses: dict[str, frozenset[str]]
    is_new_envoy: bool = False


@dataclass(frozen=True, slots=True)
class AppliedCertificate:
    """Whether Envoy has a certificate from now on, and why it did not accept the last one ("": it did).

    `is_current` is false if it has another one than the snapshot, from an earlier picker. `name` is its resource. Of
    a resource for engines with an error, `is_present` says nothing: Envoy keeps the one before, if there is one.
    """

    is_present: bool
    error: str = ""
    is_current: bool = True
    name: str = CERTIFICATE


Applied = AppliedEndpoints | AppliedCertificate


class DeltaStream:
    """The state of one stream. Feed it requests, and send what `responses` returns for the current snapshot."""

    def __init__(self) -> None:
        self._types: dict[str, _TypeState] = {}
        self._sent: dict[str, list[XdsResource]] = {}  # by nonce, until Envoy has applied or rejected it
        self._nonce = 0
        self._has_certificate = False
        self.rejected = 0  # responses that Envoy did not accept in full

    def on_request(self, request: Any, snapshot: XdsSnapshot) -> tuple[Applied, ...]:
        """Process a DeltaDiscoveryRequest. Returns what Envoy now has, if the request says so."""
        state = self._types.get(request.type_url)
        applied: tuple[Applied, ...] = ()
        if state is None:
            state = self._types[request.type_url] = self._first(request)
            applied = self._already_applied(request, state, snapshot)
        for name in request.resource_names_subscribe:
            if name != _WILDCARD:
                state.subscribed.add(name)
            if name not in request.initial_resource_versions:
                state.versions.pop(name, None)
        for name in request.resource_names_unsubscribe:
            state.subscribed.discard(name)
            state.versions.pop(name, None)
        if request.response_nonce:
            acknowledged = self._acknowledged(request)
            applied = () if acknowledged is None else (acknowledged,)
        return applied

    def responses(self, snapshot: XdsSnapshot) -> list[Any]:
        """Returns the DeltaDiscoveryResponses that bring Envoy to `snapshot`, in the order to send them.

        Each secret is a response of its own, so that Envoy's answer is about one.
        """
        found = []
        for type_url in _SEND_ORDER:
            while type_url in self._types and (response := self._response(type_url, snapshot)) is not None:
                found.append(response)
        return found

    def _first(self, request: Any) -> _TypeState:
        names = request.resource_names_subscribe
        return _TypeState(is_wildcard=not names or _WILDCARD in names, versions=dict(request.initial_resource_versions))

    def _already_applied(self, request: Any, state: _TypeState, snapshot: XdsSnapshot) -> tuple[Applied, ...]:
        """Returns what an Envoy that outlived an earlier stream has, endpoints at the versions of the snapshot."""
        if request.type_url == CLUSTER_TYPE and not state.versions:
            return (AppliedEndpoints({}, is_new_envoy=True),)
        if request.type_url == SECRET_TYPE:
            self._has_certificate = bool(state.versions.get(CERTIFICATE))
            return tuple(_applied_certificate(name, state, snapshot) for name in _SECRETS)
        if request.type_url != ENDPOINTS_TYPE:
            return ()
        current = snapshot[ENDPOINTS_TYPE]
        return (_applied(r for name, r in current.items() if state.versions.get(name) == r.version),)

    def _acknowledged(self, request: Any) -> AppliedEndpoints | AppliedCertificate | None:
        resources = self._sent.pop(request.response_nonce, [])
        if request.error_detail.code:
            self.rejected += 1
            log.error("Envoy rejects its configuration: %s", request.error_detail.message)
        if request.type_url == SECRET_TYPE:
            if not resources:
                return None  # only said that a secret does not exist
            name = resources[0].name
            if name != CERTIFICATE:
                return AppliedCertificate(not request.error_detail.code, request.error_detail.message, name=name)
            self._has_certificate |= not request.error_detail.code
            return AppliedCertificate(self._has_certificate, request.error_detail.message)
        return _applied(resources) if request.type_url == ENDPOINTS_TYPE else None

    def _response(self, type_url: str, snapshot: XdsSnapshot) -> Any | None:
        if type_url not in snapshot:
            return None
        state, current = self._types[type_url], snapshot[type_url]
        desired = current.keys() if state.is_wildcard else state.subscribed & current.keys()
        changed = [current[name] for name in desired if state.versions.get(name) != current[name].version]
        removed = [name for name, version in state.versions.items() if version and name not in current]
        if type_url == SECRET_TYPE:  # what the picker cannot read, Envoy keeps
            changed, removed = changed[:1], []
        removed += [name for name in state.subscribed - current.keys() if name not in state.versions]
        if not changed and not removed:
            return None
        self._nonce += 1
        response = DeltaDiscoveryResponse(type_url=type_url, nonce=str(self._nonce), removed_resources=removed)
        response.resources.extend(resource.message for resource in changed)
        self._sent[response.nonce] = changed
        state.versions |= {resource.name: resource.version for resource in changed}
        for name in removed:
            state.versions.pop(name, None)
        state.versions |= dict.fromkeys(state.subscribed.intersection(removed), "")
        if type_url == CLUSTER_TYPE and (endpoints := self._types.get(ENDPOINTS_TYPE)) is not None:
            for resource in changed:
                endpoints.versions.pop(resource.service, None)
        return response


def _applied_certificate(name: str, state: _TypeState, snapshot: XdsSnapshot) -> AppliedCertificate:
    version, current = state.versions.get(name), snapshot[SECRET_TYPE].get(name)
    is_current = current is not None and version == current.version
    return AppliedCertificate(bool(version), is_current=is_current, name=name)


def _applied(resources: Iterable[XdsResource]) -> AppliedEndpoints:
    return AppliedEndpoints({resource.name: resource.addresses for resource in resources})
