"""Reads the targets of services: their replica counts, their pods, and who else sets the counts.

Problem: a target can be of any kind, and its pods have no label of Plimsoll. A watch of each kind and selector would
need permissions and connections for every fleet.

Idea: each target is read every few seconds with four small requests. Fleets that are adopted number in tens, not in
thousands. Its pods go into the object cache as copies with the labels of a service's pod, so that everything that
follows (metrics, sizing, status) treats them as it treats other engines. A pod is an engine of one service: of the
oldest whose target selects it. So all targets are read first, and then applied from the oldest service on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from plimsoll.adapters.adopted_pod import adopted_copy, is_of_tier
from plimsoll.adapters.kube_client import HORIZONTALPODAUTOSCALERS, PODS, KubeClient, Resource
from plimsoll.adapters.normalize import value_at
from plimsoll.api import labels
from plimsoll.api.conditions import ConditionReason
from plimsoll.api.message_text import shorten
from plimsoll.api.v1alpha1 import EngineTarget, InferenceService, RoleName
from plimsoll.api.v1alpha1.targets import MAX_SELECTOR_CHARS
from plimsoll.controllers.isolation import ObjectErrors, Stage, subject_of
from plimsoll.controllers.object_cache import Key, ObjectCache, key_of, role_of
from plimsoll.controllers.targets.target_state import (
    OtherWriter,
    ScaledObject,
    TargetProblem,
    TargetState,
    WriterCause,
    applying_manager,
    autoscaler_of,
    built_in_autoscaler,
    later_writer,
    published_selector,
)
from plimsoll.core.autoscaling.scaling_policy import ScalingMode
from plimsoll.core.errors import ClusterError, Forbidden, NotFound
from plimsoll.resources.inference_pool import match_labels
from plimsoll.telemetry.service_log import ServiceLog

Object = dict[str, Any]
TargetKey = tuple[Key, str]  # service and role
_MAX_SHOWN_CHARS: Final = 80  # of a selector in a message
_USED_METADATA: Final = ("namespace", "name", "uid", "resourceVersion", "generation")

POLL_SECONDS: Final = 2.0
MAX_CONCURRENT_TARGETS: Final = 8
ALLOW_HINT: Final = "add it to the chart value targets.resources, and to watchNamespaces if that is set"
YIELDED_TO: Final = "yieldedTo"  # fields of a tier's status
YIELDED_CAUSE: Final = "yieldedCause"

log = ServiceLog(__name__)


@dataclass(frozen=True)
class _Reading:
    """A target that can be used. pods: their copies for the cache, by `selector`."""

    scaled: ScaledObject
    other_writer: OtherWriter | None
    pods: list[Object]
    selector: str


class TargetPoller:
    """The targets of all services, as last read. on_change: called with a service whose target has changed."""

    def __init__(
        self,
        kube: KubeClient,
        cache: ObjectCache,
        on_change: Callable[[Key], None] = lambda key: None,
        errors: ObjectErrors | None = None,
        is_managed: Callable[[Key], bool] = lambda key: True,
    ) -> None:
        """is_managed: whether this release manages a service."""
        self._kube = kube
        self._cache = cache
        self._on_change = on_change
        self._errors = errors or ObjectErrors()
        self._is_managed = is_managed
        self._states: dict[TargetKey, TargetState] = {}
        self._written: dict[TargetKey, str] = {}  # uid of the object whose count Plimsoll has set last
        self._yielded: dict[TargetKey, tuple[int, OtherWriter]] = {}  # generation of the service, and the later writer
        self._resources: dict[tuple[str, str], tuple[Resource, bool]] = {}
        self._slots = asyncio.Semaphore(MAX_CONCURRENT_TARGETS)

    def states(self, key: Key) -> dict[str, TargetState]:
        """The targets of a service, by role. One that the spec names since the last reading is not read yet."""
        obj = self._cache.get(labels.KIND, key)
        service = None if obj is None else self._cache.parsed(obj)
        if not isinstance(service, InferenceService) or service.spec.targets is None:
            return {}
        return {
            role: state
            for role, target in service.spec.targets.items()
            if (state := self._states.get((key, role))) is not None
            and state.target.scale_target_ref == target.scale_target_ref
        }

    def record_write(self, key: Key, role: str, uid: str) -> None:
        """Record that Plimsoll has set the count of a target. uid: of the object."""
        self._written[key, role] = uid

    async def run(self) -> None:
        """Poll until cancelled."""
        while True:
            await self.poll()
            await asyncio.sleep(POLL_SECONDS)

    async def poll(self) -> None:
        """Read every target once."""
        services = [
            (obj, service)
            for obj in self._cache.all(labels.KIND)
            if self._is_managed(key_of(obj))
            and not obj["metadata"].get("deletionTimestamp")
            and isinstance(service := self._cache.parsed(obj), InferenceService)
            and service.spec.targets is not None
        ]
        known = {(key_of(obj), role) for obj, service in services for role in service.spec.sized_tiers}
        for gone in self._states.keys() - known:
            self._forget(gone)
        services.sort(key=lambda one: (one[0]["metadata"].get("creationTimestamp", ""), key_of(one[0])))
        holders: dict[tuple[str, str, str, str], str] = {}
        reads: list[Coroutine[Any, Any, _Reading | TargetProblem | None]] = []
        targets = []
        for obj, service in services:
            assert service.spec.targets is not None
            for role, target in service.spec.targets.items():
                ref = target.scale_target_ref
                place = (key_of(obj)[0], ref.api_version.rpartition("/")[0], ref.kind, ref.name)
                holder = holders.setdefault(place, obj["metadata"]["name"])
                refusal = None if holder == obj["metadata"]["name"] else _taken(ref.label, holder)
                reads.append(_known(refusal) if refusal else self._read_contained(obj, service, role, target))
                targets.append((obj, role, target))
        engines: dict[Key, tuple[Key, EngineTarget]] = {}  # pods with the service that they are engines of
        for (obj, role, target), found in zip(targets, await asyncio.gather(*reads), strict=True):
            key = key_of(obj)
            if found is not None:  # else the last readings hold until the API server answers
                with self._errors.contained(Stage.TARGET, key, subject_of(obj)):
                    self._apply(obj, role, target, found, engines)
            engines.update((key_of(pod), (key, target)) for pod in self._pods(key, role))

    def _apply(
        self,
        obj: Object,
        role: RoleName,
        target: EngineTarget,
        found: _Reading | TargetProblem,
        engines: Mapping[Key, tuple[Key, EngineTarget]],
    ) -> None:
        """Keep what was read of a target. obj: its service. engines: the pods of older services."""
        key = key_of(obj)
        pods = found.pods if isinstance(found, _Reading) else []
        if (problem := _overlap(key, target, pods, engines)) is not None:
            found, pods = problem, []
        self._replace_pods(key, role, pods)
        if isinstance(found, TargetProblem):
            state = TargetState(target, problem=found, selector=self._last_selector(obj, role, target, found))
        else:
            state = TargetState(target, found.scaled, other_writer=found.other_writer, selector=found.selector)
        before = self._states.get((key, role))
        self._states[key, role] = state
        if before != state:
            self._on_change(key)

    def _last_selector(self, obj: Object, role: RoleName, target: EngineTarget, problem: TargetProblem) -> str | None:
        """The selector that gateways keep for a target with a problem: its engines may well serve all the same."""
        if not problem.has_engines:
            return None
        before = self._states.get((key_of(obj), role))
        if before is None:
            return published_selector(obj, role)
        return before.selector if before.target == target else None

    async def _read_contained(
        self, obj: Object, service: InferenceService, role: RoleName, target: EngineTarget
    ) -> _Reading | TargetProblem | None:
        async with self._slots:
            with self._errors.contained(Stage.TARGET, key_of(obj), subject_of(obj)):
                try:
                    return await self._read(obj, service, role, target)
                except ClusterError as error:
                    log.debug(key_of(obj), "cannot read the target", role=role, error=str(error))
                    if (key_of(obj), role) not in self._states:
                        message = f"the API server does not return {target.scale_target_ref.label}: {error}"
                        return TargetProblem(ConditionReason.TARGET_UNREADABLE, message)
        return None

    async def _read(
        self, obj: Object, service: InferenceService, role: RoleName, target: EngineTarget
    ) -> _Reading | TargetProblem:
        ref, key = target.scale_target_ref, key_of(obj)
        try:
            found = await self._resource(ref.api_version, ref.kind)
            if isinstance(found, TargetProblem):
                return found
            written = self._written.get((key, role))  # before the read: a write that follows is not in it
            live = await self._kube.get(found, key[0], ref.name)
            scale = await self._kube.get_scale(found, key[0], ref.name)
            selector = target.pod_selector or value_at(scale, "status", "selector")
            problem = _unusable(ref.label, live, selector, is_routed=target.port is not None)
            if problem is not None:
                return problem
            pods, _ = await self._kube.list(PODS, key[0], str(selector))
            if target.port is not None and (tier_pod := next(filter(is_of_tier, pods), None)) is not None:
                return _of_tier(ref.label, tier_pod)
            autoscalers, _ = await self._kube.list(HORIZONTALPODAUTOSCALERS, key[0])
        except NotFound:
            message = f"{ref.api_version} {ref.label} does not exist in namespace {key[0]}"
            return TargetProblem(ConditionReason.TARGET_NOT_FOUND, message)
        except Forbidden as error:
            message = f"the operator may not read {ref.api_version} {ref.kind} or its scale ({error}); {ALLOW_HINT}"
            return TargetProblem(ConditionReason.TARGET_FORBIDDEN, message)
        replicas, counted = value_at(scale, "spec", "replicas"), value_at(scale, "status", "replicas")
        metadata = {name: live["metadata"][name] for name in _USED_METADATA if name in live["metadata"]}
        scaled = ScaledObject(
            found,
            metadata,
            replicas if isinstance(replicas, int) else 0,
            counted=counted if isinstance(counted, int) else 0,
        )
        other_writer = None
        if service.spec.mode is ScalingMode.AUTO:
            other_writer = self._other_writer(
                obj, role, target, live, autoscalers, was_written=written == metadata.get("uid")
            )
        else:
            self._written.pop((key, role), None)
        facts = {"metricsPort": target.metrics_port, "gpus": target.gpus, "model": service.spec.model.uri}
        copies = [adopted_copy(pod, key[1], role, facts) for pod in pods if not is_of_tier(pod)]
        return _Reading(scaled, other_writer, copies, str(selector))

    def _other_writer(
        self,
        obj: Object,
        role: RoleName,
        target: EngineTarget,
        live: Object,
        autoscalers: list[Object],
        *,
        was_written: bool,
    ) -> OtherWriter | None:
        """Who else sets the count. A later writer is yielded to until the service's spec changes."""
        place, generation = (key_of(obj), role), int(obj["metadata"].get("generation", 0))
        ref = target.scale_target_ref
        other_writer = autoscaler_of(ref, autoscalers) or built_in_autoscaler(ref, live) or applying_manager(live)
        if other_writer is not None:
            self._written.pop(place, None)
            return other_writer
        before = value_at(obj, "status", "tiers", role) or {}
        is_current = value_at(obj, "status", "observedGeneration") == generation
        if place not in self._states and is_current and before.get(YIELDED_CAUSE) == WriterCause.LATER_WRITE:
            other_writer = OtherWriter(
                WriterCause.LATER_WRITE, str(before.get(YIELDED_TO, ""))
            )  # as an earlier process had found
            self._yielded[place] = generation, other_writer
        if was_written and (writer := later_writer(live)) is not None:
            self._written.pop(place, None)
            self._yielded[place] = generation, writer
        since, known = self._yielded.get(place, (generation, None))
        if since != generation:
            del self._yielded[place]
            return None
        return known

    async def _resource(self, api_version: str, kind: str) -> Resource | TargetProblem:
        """The resource of a kind. A found one is kept; what is not served yet may be later."""
        found = self._resources.get((api_version, kind)) or await self._kube.discover(api_version, kind)
        if found is None:
            return TargetProblem(
                ConditionReason.TARGET_NOT_FOUND, f"the cluster serves no kind {kind} in {api_version}"
            )
        resource, is_scalable = found
        if not is_scalable or not resource.namespaced:
            message = f"{api_version} {kind} has no scale subresource in a namespace, so its replicas cannot be set"
            return TargetProblem(ConditionReason.TARGET_NOT_SCALABLE, message)
        self._resources[api_version, kind] = found
        return resource

    def _forget(self, place: TargetKey) -> None:
        del self._states[place]
        self._written.pop(place, None)
        self._yielded.pop(place, None)
        self._replace_pods(*place, ())

    def _pods(self, key: Key, role: str) -> list[Object]:
        return [pod for pod in self._cache.children(labels.ADOPTED_POD_KIND, key) if role_of(pod) == role]

    def _replace_pods(self, key: Key, role: str, pods: Iterable[Object]) -> None:
        """Replace the copies of one target, and keep those of the service's other one."""
        others = [pod for pod in self._cache.children(labels.ADOPTED_POD_KIND, key) if role_of(pod) != role]
        self._cache.replace_children(labels.ADOPTED_POD_KIND, key, [*others, *pods])


async def _known(problem: TargetProblem) -> TargetProblem:
    """The result for a target that is not read."""
    return problem


def _taken(label: str, holder: str) -> TargetProblem:
    message = f"{label} is the target of InferenceService {holder} already: delete one of the two services"
    return TargetProblem(ConditionReason.TARGET_TAKEN, message, has_engines=False)


def _of_tier(label: str, pod: Object) -> TargetProblem:
    """A Service cannot leave out some of the pods that it selects."""
    message = (
        f"the selector of {label} selects pod {pod['metadata']['name']}, an engine of the tiers of an InferenceService:"
        " narrow podSelector"
    )
    return TargetProblem(ConditionReason.TARGET_OVERLAPS, message, has_engines=False)


def _unusable(label: str, live: Object, selector: object, *, is_routed: bool) -> TargetProblem | None:
    """Why an object cannot be a target; None if it can. is_routed: whether gateways send requests to its pods."""
    own = live["metadata"].get("labels", {})
    if own.get(labels.MANAGED_BY) == "plimsoll" and labels.SERVICE in own:
        message = f"{label} belongs to InferenceService {own[labels.SERVICE]}, which sizes it already"
        return TargetProblem(ConditionReason.TARGET_TAKEN, message, has_engines=False)
    if not isinstance(selector, str) or not selector:
        message = f"the scale of {label} has no status.selector: set podSelector"
        return TargetProblem(ConditionReason.TARGET_NOT_SCALABLE, message)
    if len(selector) > MAX_SELECTOR_CHARS:
        message = (
            f"status.selector in the scale of {label} has {len(selector)} characters, at most {MAX_SELECTOR_CHARS} can"
            " be used: set podSelector"
        )
        return TargetProblem(ConditionReason.TARGET_NOT_SCALABLE, message)
    if is_routed and match_labels(selector) is None:
        message = (
            f"a Service selects pods by NAME=VALUE pairs alone, and status.selector in the scale of {label} is"
            f" {shorten(selector, _MAX_SHOWN_CHARS)}: set podSelector to such pairs"
        )
        return TargetProblem(ConditionReason.TARGET_NOT_SCALABLE, message, has_engines=False)
    return None


def _overlap(
    key: Key, target: EngineTarget, pods: list[Object], engines: Mapping[Key, tuple[Key, EngineTarget]]
) -> TargetProblem | None:
    """Why the pods of a target cannot be engines of its service; None if they can. engines: pods of older services."""
    shared = sorted(place for place in map(key_of, pods) if place in engines)
    if not shared:
        return None
    (_, holder), other = engines[shared[0]]
    services = (
        f"InferenceService {key[1]}"
        if holder == key[1]
        else f"InferenceService {key[1]} or of InferenceService {holder}"
    )
    message = (
        f"{len(shared)} of {len(pods)} pods of {target.scale_target_ref.label}, such as {shared[0][1]}, are engines of"
        f" InferenceService {holder} ({other.scale_target_ref.label}) already: narrow podSelector of {services}"
    )
    return TargetProblem(ConditionReason.TARGET_OVERLAPS, message, has_engines=False)
