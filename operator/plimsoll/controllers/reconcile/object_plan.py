"""Plans the writes of a reconcile from the observed state and the decided replica counts. Pure.

A tier's pod template is rendered once for each state of the user's spec, and stored in a ControllerRevision. The plan
uses the stored template, so that a new operator, chart or default image does not restart engines.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from plimsoll.api import labels
from plimsoll.api.v1alpha1 import InferenceService
from plimsoll.controllers.autoscale.scaling_status import ScalingReport
from plimsoll.controllers.reconcile.applied_cache import has_foreign_replicas_owner
from plimsoll.controllers.reconcile.observe import ObservedService
from plimsoll.resources import object_meta, objects
from plimsoll.resources.objects import StoredTemplate
from plimsoll.resources.platform_config import PlatformConfig

Object = dict[str, Any]


@dataclass(frozen=True)
class ObjectPlan:
    """The objects of a converged service.

    templates: ControllerRevisions to create first. desired: objects to apply. prune: objects to delete. revisions: name
    of the ControllerRevision of each tier.
    """

    templates: tuple[Object, ...]
    desired: tuple[Object, ...]
    prune: tuple[Object, ...]
    revisions: dict[str, str]


def plan_objects(
    observed: ObservedService,
    service: InferenceService,
    replicas: Mapping[str, int],
    platform: PlatformConfig,
    report: ScalingReport | None = None,
) -> ObjectPlan:
    """The plan for one service. replicas: desired replicas by tier.

    A service with targets has no objects. report: has the admission limits to publish. Before the first report of this
    process, the published ones stay.
    """
    if service.spec.targets is not None:
        return ObjectPlan((), (), (), {})
    templates: list[Object] = []
    desired = objects.shared_objects(service, observed.service_object, platform)
    revisions: dict[str, str] = {}
    for kind, _ in service.spec.tiers.items():
        name = revisions[kind] = objects.revision_name(service, kind)
        template_revision = observed.revisions.get(name)
        if template_revision is None or not template_revision.get("data"):
            earlier = observed.revisions.get(objects.earlier_revision_name(service, kind), {})
            template_revision = objects.template_revision(
                service, observed.service_object, kind, platform, earlier.get("data")
            )
            templates.append(template_revision)
        deployment = observed.children.get(("Deployment", object_meta.tier_name(service.metadata.name, kind)))
        desired += objects.tier_objects(
            service,
            observed.service_object,
            kind,
            StoredTemplate(name, template_revision["data"]),
            _applied_replicas(deployment, replicas[kind]),
        )
    if report is not None and report.published is not None:
        desired.append(objects.admission(observed.service_object, report.published))
    desired_names = {(obj["kind"], obj["metadata"]["name"]) for obj in desired}
    prune = tuple(
        child
        for child_name, child in observed.children.items()
        if child_name not in desired_names
        and (report is not None or child["kind"] != labels.ADMISSION_KIND)
        and not _is_mounted(child, observed.pods)
    )
    return ObjectPlan(tuple(templates), tuple(desired), prune, revisions)


def _is_mounted(child: Object, pods: Iterable[Object]) -> bool:
    """Whether a pod mounts a ConfigMap. Without it, a pod of the old template would not start during a rollout."""
    return child["kind"] == "ConfigMap" and any(
        volume.get("configMap", {}).get("name") == child["metadata"]["name"]
        for pod in pods
        for volume in pod.get("spec", {}).get("volumes", [])
    )


def _applied_replicas(deployment: Object | None, desired: int) -> int | None:
    """spec.replicas of the apply; None to leave the field out, once another field manager owns it.

    The first apply sets the count and later ones repeat the live value, because changes go through the scale
    subresource. An apply that left out the field while still owning it would remove it.
    """
    if deployment is None:
        return desired
    return None if has_foreign_replicas_owner(deployment) else int(deployment["spec"].get("replicas", 1))
