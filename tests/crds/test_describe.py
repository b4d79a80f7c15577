"""`kubectl describe inferenceservice`, by kubectl itself: a settled service fits one screen."""

from __future__ import annotations

import json

import pytest

from tests.api.manifests import Manifest
from tests.controllers.test_status_size import SETTLED, described, settled
from tests.crds.conftest import Kubectl

pytestmark = pytest.mark.api


@pytest.mark.parametrize("case", SETTLED)
async def test_describe_of_settled_service_fits_a_screen(kubectl: Kubectl, case: str) -> None:
    manifest, rate, limit = SETTLED[case]
    status, name = (await settled(manifest, rate))["status"], f"settled-{case.lower().replace(' ', '-')}"
    applied: Manifest = {**manifest, "metadata": {"name": name}}
    kubectl.apply(applied | {"apiVersion": "plimsoll.dev/v1alpha1", "kind": "InferenceService"})
    patch = json.dumps({"status": status})
    kubectl.run_ok("patch", "plim", name, "--subresource=status", "--type=merge", "-p", patch)
    text = kubectl.run_ok("describe", "plim", name)
    lines = text.rstrip("\n").splitlines()
    assert len(lines) <= limit, text
    stored = kubectl.get("plim", name)
    assert stored["status"] == status, "the definition has every field"
    assert len(lines) == len(described(stored)), text
