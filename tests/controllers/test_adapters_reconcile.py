"""Adapters against a real API server: the ConfigMap follows the spec, the pod template does not, names are granted."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.controllers.conftest import ControllerHarness

pytestmark = pytest.mark.api

SERVE: dict[str, Any] = {"tiers": {"serve": {}}, "engine": {"lora": {"maxLoras": 2}}}


def adapter(name: str) -> dict[str, Any]:
    return {"name": name, "uri": f"hf://acme/{name}"}


async def desired(world: ControllerHarness) -> list[str]:
    found = await world.get("ConfigMap", "chat-adapters")
    return [one["name"] for one in json.loads(found["data"]["adapters.json"])["adapters"]]


async def test_adapters_reach_engines_without_a_new_template(world: ControllerHarness) -> None:
    made = await world.create(**SERVE)
    operator = await world.reconcile_once("chat")
    template = (await world.get("Deployment", "chat-serve"))["spec"]["template"]
    assert await desired(world) == []
    for names in (["sql"], ["sql", "law"], ["law"]):
        made = await world.service()
        made["spec"]["adapters"] = [adapter(name) for name in names]
        await world.edit(made)
        await world.reconcile_once("chat", operator)
        await world.reconcile_once("chat", operator)
        assert await desired(world) == names
        assert (await world.get("Deployment", "chat-serve"))["spec"]["template"] == template
        status = (await world.service())["status"]["adapters"]
        assert [entry["name"] for entry in status] == names
        assert all(entry["since"] for entry in status)


async def test_adapter_name_of_another_service_is_rejected(world: ControllerHarness) -> None:
    await world.create("sql", **SERVE)
    operator = await world.reconcile_once("sql")
    await world.create(**SERVE, adapters=[adapter("sql"), adapter("law")])
    await world.reconcile_once("chat", operator)
    status = (await world.service())["status"]
    assert [("since" in entry) for entry in status["adapters"]] == [False, True]
    rejected = {one["type"]: one["message"] for one in status["conditions"]}["ModelNameRejected"]
    assert f"spec.adapters sql: service {world.namespace}/sql holds the name since" in rejected
    assert "ModelNameTaken" in await world.events()


async def test_config_map_ends_with_lora(world: ControllerHarness) -> None:
    made = await world.create(tiers={"serve": {}})
    operator = await world.reconcile_once("chat")
    await world.edit({**made, "spec": {**made["spec"], "adapters": [adapter("sql")]}})
    await world.reconcile_once("chat", operator)
    assert await desired(world) == ["sql"]
    await world.edit(made)
    await world.reconcile_once("chat", operator)
    assert "chat-adapters" not in await world.names("ConfigMap")
    assert "adapters" not in (await world.service())["status"]
