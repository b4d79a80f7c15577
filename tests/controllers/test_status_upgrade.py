"""An operator that follows one whose status had other types: no field changes its type under its name.

Server-side apply reads the stored status by the new CRD, and fails for ever at a field of another type.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from plimsoll.adapters.kube_client import KubeClient
from plimsoll.api import labels
from tests.apiserver import CRDS, ApiServer, api_server
from tests.controllers.conftest import ControllerHarness, FaultyKube

pytestmark = pytest.mark.api

Object = dict[str, Any]

DEADLINE_SECONDS = 30
TEXT, COUNT = {"type": "string"}, {"type": "integer", "format": "int32"}
OLD_STATUS = {
    "modelNameClaim": {"name": "chat", "since": "2026-01-01T00:00:00Z"},
    "formerModelNames": [{"name": "old", "until": "2026-01-01T00:00:00Z"}],
    "tiers": {"decode": {"ready": 0, "starting": {"count": 1, "overdue": 1, "nextReady": "2026-01-01T00:00:00Z"}}},
}


def typed(**fields: Object) -> Object:
    return {"type": "object", "properties": fields}


def old_crd(path: Path) -> Object:
    """The CRD with the types that these fields had."""
    crd: Object = yaml.safe_load(path.read_text())
    status = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"]
    status["modelNameClaim"] = typed(name=TEXT, since=TEXT)
    status["formerModelNames"] = {"type": "array", "items": typed(name=TEXT, until=TEXT)}
    status["tiers"]["properties"]["decode"]["properties"] |= {
        "ready": COUNT,
        "starting": typed(count=COUNT, overdue=COUNT, nextReady=TEXT),
    }
    return crd


@pytest.fixture
async def upgraded(tmp_path: Path) -> AsyncIterator[tuple[ControllerHarness, ApiServer]]:
    """A world of its own with the old CRD, since another test must not meet it."""
    [path] = [one for one in CRDS if one.name == "plimsoll.dev_inferenceservices.yaml"]
    old = tmp_path / path.name
    old.write_text(json.dumps(old_crd(path)))
    with api_server("AlwaysAllow") as server:
        await asyncio.to_thread(server.install_crds, [*(one for one in CRDS if one != path), old])
        connected = await KubeClient.connect(str(server.kubeconfig))
        yield ControllerHarness(FaultyKube(connected._api), "default"), server
        await connected.close()


async def test_reconcile_replaces_status_of_old_types(upgraded: tuple[ControllerHarness, ApiServer]) -> None:
    world, server = upgraded
    await world.create(tiers={"decode": {}, "prefill": {}})
    meta = {"name": "chat", "namespace": world.namespace}
    stored = {"apiVersion": labels.API_VERSION, "kind": labels.KIND, "metadata": meta, "status": OLD_STATUS}
    await world.kube.apply(stored, labels.FIELD_MANAGER, subresource="status")
    assert (await world.service())["status"] == OLD_STATUS
    await asyncio.to_thread(server.install_crds)
    async with asyncio.timeout(DEADLINE_SECONDS):
        while (await world.service())["status"] == OLD_STATUS:  # the server still serves the old schema
            await asyncio.sleep(0.05)
    await world.reconcile_once("chat")
    status = (await world.service())["status"]
    assert status["conditions"]
    assert status["nameClaim"].startswith("chat since ")
    assert not {"modelNameClaim", "formerModelNames"} & status.keys()
    assert "starting" not in status["tiers"]["decode"]
