"""Plans the writes of a reconcile from the observed state and the decided replica counts. Pure.

A tier's pod template is rendered once for each state of the user's spec, and stored in a ControllerRevision. The plan
uses the stored template, so that a new operator, chart or default image does not restart engines. The platform's
rollout renders it again when the generation of the platform's settings changes and it is the service's turn. A chunk
that measurements prefer is another revision of the same template. The Deployment's label has it, so that a lost report
or checkpoint restarts no engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from plimsoll.api import labels
from plimsoll.api.v1alpha1 import InferenceService, RoleName
from plimsoll.controllers.autoscale.scaling_status import ScalingReport
from plimsoll.controllers.reconcile.applied_cache import has_foreign_replicas_owner
from plimsoll.controllers.reconcile.engine_publication import left_out, published_engines
from plimsoll.controllers.reconcile.observe import ObservedService
from plimsoll.controllers.tier_workload import TIER_WORKLOADS, find_workload, ordered_replicas
from plimsoll.core import codec
from plimsoll.core.routing.published_engines import PublishedEngines
from plimsoll.resources import engine_tuning, object_meta, objects
from plimsoll.resources.engine_tuning import MeasuredChunk
from plimsoll.resources.inference_pool import match_labels
from plimsoll.resources.objects import StoredTemplate
from plimsoll.resources.platform_config import PlatformConfig

Object = dict[str, Any]

_WORKLOAD_KINDS: Final = frozenset(kind.kind for kind in TIER_WORKLOADS)


@dataclass(frozen=True)
class ObjectPlan:
    """The objects of a converged service.

    templates: ControllerRevisions to create first. desired: objects to apply. prune: objects to delete. revisions: name
    of the ControllerRevision of each tier. left_out: number of engines that gateways do not use.
    """

    templates: tuple[Object, ...]
    desired: tuple[Object, ...]
    prune: tuple[Object, ...]
    revisions: dict[str, str]
    left_out: int = 0


def plan_objects(
    observed: ObservedService,
    service: InferenceService,
    replicas: Mapping[str, int],
    platform: PlatformConfig,
    report: ScalingReport | None = None,
    *,
    has_turn: bool = False,
    target_selector: str | None = None,
    is_target_unread: bool = False,
) -> ObjectPlan:
    """The plan for one service. replicas: desired replicas by tier.

    A service with targets has a Service for their pods and admission limits alone, if it takes requests. report: has
    the limits to publish. Before the first report of this process, the published ones stay. has_turn: whether the
    platform's rollout may replace the engines now. target_selector: of the pods of a target that takes requests.
    is_target_unread: what gateways have of its engines stays.
    """
    templates: list[Object] = []
    desired = objects.shared_objects(service, observed.service_object, platform)
    revisions: dict[str, str] = {}
    wanted = None if report is None else report.measured_chunk
    for kind, template_revision in _template_revisions(observed, service, platform, wanted, has_turn=has_turn).items():
        name = revisions[kind] = template_revision["metadata"]["name"]
        if not observed.revisions.get(name, {}).get("data"):
            templates.append(template_revision)
        desired += objects.tier_objects(
            service,
            observed.service_object,
            kind,
            StoredTemplate(
                name,
                template_revision["data"],
                objects.template_generation(template_revision),
                engine_tuning.measured_chunk(template_revision),
            ),
            _applied_replicas(_workload(observed, service, kind), replicas[kind]),
        )
    desired += _target_objects(observed, service, target_selector)
    is_kept = is_target_unread and _target_port(service) is not None
    unused = 0
    if service.spec.takes_requests:
        live = _live_engines(observed) if is_kept else None
        engines = live or _engines(observed, service, desired)
        desired.append(_admission(observed, engines, report))
        unused = 0 if live else left_out(engines, observed.pods)
    desired_names = {(obj["kind"], obj["metadata"]["name"]) for obj in desired}
    if is_kept:
        desired_names.add(("Service", object_meta.targets_name(service.metadata.name)))
    prune = tuple(
        child
        for child_name, child in observed.children.items()
        if child_name not in desired_names and not _is_mounted(child, observed.pods)
    )
    return ObjectPlan(tuple(templates), tuple(desired), prune, revisions, unused)


def plan_invalid(observed: ObservedService) -> ObjectPlan:
    """The plan for a service with an invalid spec: what gateways need of the engines that run on, and no more.

    Nothing says what the targets of an invalid spec are: what is published of them stays.
    """
    workloads = [child for (kind, _), child in observed.children.items() if kind in _WORKLOAD_KINDS]
    if not workloads:
        return ObjectPlan((), (), (), {})
    engines = published_engines(workloads, observed.pods, observed.earlier_pods)
    admission = _admission(observed, engines, None)
    return ObjectPlan((), (admission,), (), {}, left_out(engines, observed.pods))


def _target_objects(observed: ObservedService, service: InferenceService, selector: str | None) -> list[Object]:
    """The Service for the pods of a target that takes requests. The poller refuses a selector without pairs."""
    port = _target_port(service)
    pairs = match_labels(selector) if selector else None
    return [objects.targets_service(service, observed.service_object, pairs, port)] if port and pairs else []


def _target_port(service: InferenceService) -> int | None:
    """The port at which a target takes requests, None if it takes none."""
    return None if service.spec.targets is None else service.spec.targets.port


def _live_engines(observed: ObservedService) -> PublishedEngines | None:
    """The engines that are published, None without readable ones."""
    live = observed.children.get((labels.ADMISSION_KIND, observed.service_object["metadata"]["name"])) or {}
    try:
        return codec.decode(PublishedEngines, live["engines"]) if "engines" in live else None
    except ValueError:
        return None


def _engines(observed: ObservedService, service: InferenceService, desired: Iterable[Object]) -> PublishedEngines:
    """The engines to publish. desired: the other objects of the service."""
    workloads = [one for one in desired if one["kind"] in _WORKLOAD_KINDS]
    targets = () if service.spec.targets is None else [role for role, _ in service.spec.targets.items()]
    return published_engines(workloads, observed.pods, observed.earlier_pods, targets)


def _admission(observed: ObservedService, engines: PublishedEngines, report: ScalingReport | None) -> Object:
    """What gateways are to read."""
    if report is None:
        live = observed.children.get((labels.ADMISSION_KIND, observed.service_object["metadata"]["name"]))
        return objects.admission(observed.service_object, (live or {}).get("limits"), engines)
    limits = None if report.published is None else codec.encode(report.published)
    return objects.admission(observed.service_object, limits, engines)


def _template_revisions(
    observed: ObservedService,
    service: InferenceService,
    platform: PlatformConfig,
    wanted: MeasuredChunk | None,
    *,
    has_turn: bool,
) -> dict[RoleName, Object]:
    """The ControllerRevision of each tier: the stored one, or a new one at the platform's present generation.

    All tiers have the present generation, or none has: engines of two generations may not exchange KV blocks. Thus a
    change of the user's spec takes all tiers to it, and so does a generation whose templates are the stored ones.
    Another chunk, which only the tier `serve` can get, leaves everything else as it is. wanted: None for no change.
    """
    parent, generation = observed.service_object, platform.engine.rollout.generation
    present, former, rendered = dict[RoleName, Object](), dict[RoleName, Object](), dict[RoleName, Object]()
    kinds = [kind for kind, _ in service.spec.tiers.items()]
    for kind in kinds:
        in_use = _revision_in_use(observed, service, kind)
        chunk = engine_tuning.measured_chunk(in_use)
        if in_use is not None and wanted is not None and _is_other_chunk(wanted, service, kind, chunk):
            return {kind: _with_chunk(observed, service, kind, in_use, wanted)}
        stored = observed.revisions.get(objects.revision_name(service, kind, generation, chunk))
        if stored is not None and stored.get("data"):
            present[kind] = stored
            continue
        earlier = observed.revisions.get(objects.earlier_revision_name(service, kind))
        replaced = in_use or _former_revision(observed, service, kind) or earlier
        if replaced is not None:
            former[kind] = replaced
        template = None if earlier is None or generation else earlier["data"]
        rendered[kind] = objects.template_revision(service, parent, kind, platform, template, chunk_of=in_use)
    is_same = all(kind in former and _is_same_template(former[kind], rendered[kind]) for kind in rendered)
    if len(former) == len(kinds) and not is_same and not has_turn:
        return former
    is_rollout = any(labels.ROLLED_OUT in revision["metadata"].get("labels", {}) for revision in present.values())
    if is_rollout or (has_turn and not is_same):
        for revision in rendered.values():
            revision["metadata"]["labels"][labels.ROLLED_OUT] = "true"
    return present | rendered


def _is_other_chunk(wanted: MeasuredChunk, service: InferenceService, kind: RoleName, chunk: int) -> bool:
    """Whether a chunk is asked for that engines of the user's present spec do not have."""
    return kind == "serve" and wanted.tokens != chunk and wanted.revision == objects.revision_name(service, kind)


def _with_chunk(
    observed: ObservedService, service: InferenceService, kind: RoleName, in_use: Object, wanted: MeasuredChunk
) -> Object:
    """The ControllerRevision that differs from the one in use in the chunk alone: the stored one, or a new one."""
    name = objects.revision_name(service, kind, objects.template_generation(in_use), wanted.tokens)
    stored = observed.revisions.get(name)
    if stored is not None and stored.get("data"):
        return stored
    return objects.revision_with_chunk(service, observed.service_object, kind, in_use, wanted)


def _revision_in_use(observed: ObservedService, service: InferenceService, kind: RoleName) -> Object | None:
    """The stored template for the user's present spec that the workload has; None if there is none."""
    workload = _workload(observed, service, kind)
    generation, chunk = objects.template_generation(workload), engine_tuning.measured_chunk(workload)
    stored = observed.revisions.get(objects.revision_name(service, kind, generation, chunk))
    return stored if workload is not None and stored is not None and stored.get("data") else None


def _former_revision(observed: ObservedService, service: InferenceService, kind: RoleName) -> Object | None:
    """A stored template for the user's present spec at another generation, of a workload that has yet another one."""
    found = (
        revision
        for name, revision in observed.revisions.items()
        if revision.get("data") and name == objects.revision_name(service, kind, objects.template_generation(revision))
    )
    return next(found, None)


def _is_same_template(stored: Object, rendered: Object) -> bool:
    return object_meta.short_hash(stored["data"]) == object_meta.short_hash(rendered["data"])


def _workload(observed: ObservedService, service: InferenceService, kind: RoleName) -> Object | None:
    return find_workload(observed.children, service.metadata.name, kind)


def _is_mounted(child: Object, pods: Iterable[Object]) -> bool:
    """Whether a pod mounts a ConfigMap. Without it, a pod of the old template would not start during a rollout."""
    return child["kind"] == "ConfigMap" and any(
        volume.get("configMap", {}).get("name") == child["metadata"]["name"]
        for pod in pods
        for volume in pod.get("spec", {}).get("volumes", [])
    )


def _applied_replicas(workload: Object | None, desired: int) -> int | None:
    """spec.replicas of the apply; None to leave the field out, once another field manager owns it.

    The first apply sets the count and later ones repeat the live value, because changes go through the scale
    subresource. An apply that left out the field while still owning it would remove it.
    """
    if workload is None:
        return desired
    return None if has_foreign_replicas_owner(workload) else ordered_replicas(workload)
