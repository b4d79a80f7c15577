"""A delivery tool finds no difference between git and the cluster, however it applies, whatever the operator writes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.controllers.status_inputs import status_inputs
from tests.crds.conftest import APPLY_MODES, Kubectl
from tests.docs.test_gitops import GITOPS, argo_health, with_written_status

Object = dict[str, Any]

SERVICES = GITOPS / "services"
TURNS = (*APPLY_MODES, *APPLY_MODES)  # client-side, server-side, and each again after the other

pytestmark = pytest.mark.api


def diff(kubectl: Kubectl, mode: str) -> str:
    """What `kubectl diff` shows, which a delivery tool would try to correct for ever."""
    found = kubectl.run("diff", *APPLY_MODES[mode], "-f", str(SERVICES / "chat.yaml"))
    assert found.returncode in (0, 1), found.stderr
    return found.stdout


def written_by_operator(kubectl: Kubectl) -> Object:
    """The live object after the operator has written what it writes into it: the status."""
    live = kubectl.get("plim", "chat", "-n", "team")
    made = with_written_status(replace(status_inputs(), service_object=live))
    status: Object = {key: made[key] for key in ("apiVersion", "kind", "status")}
    status["metadata"] = {"name": "chat", "namespace": "team"}
    kubectl.apply(status, "--server-side", "--force-conflicts", "--subresource=status", "--field-manager=plimsoll")
    return kubectl.get("plim", "chat", "-n", "team", "--show-managed-fields")


def test_both_ways_of_apply_agree_side_by_side(kubectl: Kubectl) -> None:
    """kubectl, Flux and Argo CD deliver one object in turns: none sees a difference, and none owns the status."""
    for mode in TURNS:
        kubectl.run_ok("apply", *APPLY_MODES[mode], "-k", str(SERVICES))
        live = written_by_operator(kubectl)
        assert {reader: diff(kubectl, reader) for reader in APPLY_MODES} == dict.fromkeys(APPLY_MODES, ""), mode
    owners = {entry["manager"]: entry["fieldsV1"] for entry in live["metadata"]["managedFields"]}
    assert {"tests", "plimsoll"} <= owners.keys()
    assert "f:spec" not in owners["plimsoll"]
    assert all("f:status" not in fields for manager, fields in owners.items() if manager != "plimsoll")
    assert live["metadata"]["generation"] == 1
    assert argo_health("plimsoll.dev_InferenceService", live)[0] == "Healthy"
    changed = kubectl.run("diff", "-f", "-", stdin=(SERVICES / "chat.yaml").read_text().replace("500ms", "600ms"))
    assert (changed.returncode, "600ms" in changed.stdout) == (1, True), "a real change is seen"
    kubectl.run_ok("delete", "-f", str(SERVICES / "chat.yaml"))
