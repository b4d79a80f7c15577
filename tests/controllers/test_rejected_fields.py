"""What the API server says of a Deployment names the fields of the service."""

from __future__ import annotations

import pytest

from plimsoll.controllers.reconcile.rejected_fields import in_service_terms
from plimsoll.core.errors import BackendUnavailable
from tests.controllers.conftest import ControllerHarness


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (
            'Deployment.apps "a" is invalid: spec.template.spec.affinity.nodeAffinity.x[0].y: Required value',
            'Deployment.apps "a" is invalid: spec.tiers.serve.pod.affinity.nodeAffinity.x[0].y: Required value',
        ),
        (
            "failed to create typed patch object (n/a; apps/v1, Kind=Deployment): .spec.template.spec.affinity.k: no",
            "failed to create typed patch object (n/a; apps/v1, Kind=Deployment): spec.tiers.serve.pod.affinity.k: no",
        ),
        ("spec.template.spec.tolerations[1].effect: no", "spec.tiers.serve.pod.tolerations[1].effect: no"),
        ("spec.template.spec.volumes[2].hostPath.path: no", "spec.tiers.serve.pod.volumes.hostPath.path: no"),
        (
            'spec.template.spec.containers[0].volumeMounts[3].name: Not found: "v"',
            'spec.tiers.serve.pod.volumeMounts.name: Not found: "v"',
        ),
        ("spec.template.spec.containers[0].resources.requests: no", "spec.tiers.serve.pod.resources.requests: no"),
        ("spec.template.spec.volumesOther: no", "spec.template.spec.volumesOther: no"),
        ("spec.template.spec.containers[0].image: no", "spec.template.spec.containers[0].image: no"),
    ],
)
def test_in_service_terms_names_the_field_of_the_service(message: str, expected: str) -> None:
    assert in_service_terms(message, "serve") == expected


@pytest.mark.api
async def test_rejected_affinity_is_named_in_the_status(world: ControllerHarness) -> None:
    terms = [{"matchExpressions": [{"key": "zone", "operator": "Near"}]}]
    node_affinity = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    await world.create(tiers={"serve": {"minReplicas": 1, "pod": {"affinity": {"nodeAffinity": node_affinity}}}})
    with pytest.raises(BackendUnavailable, match=r"spec\.tiers\.serve\.pod\.affinity"):
        await world.reconcile_once("chat")
    stalled = next(one for one in (await world.service())["status"]["conditions"] if one["type"] == "Stalled")
    assert "spec.tiers.serve.pod.affinity" in stalled["message"]
