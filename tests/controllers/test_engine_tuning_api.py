"""Engine arguments from the SLO, on a real API server: what users see, and what never changes by itself."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from plimsoll.adapters.kube_client import EVENTS
from plimsoll.api import labels
from plimsoll.api.v1alpha1 import parse
from plimsoll.controllers.autoscale.scaling_status import initial_report
from plimsoll.resources import objects
from plimsoll.resources.engine_tuning import MeasuredChunk
from plimsoll.resources.platform_config import EngineDefaults
from plimsoll.telemetry import operator_metrics
from tests import builders
from tests.controllers.conftest import ControllerHarness

pytestmark = pytest.mark.api

Object = dict[str, Any]

SPEC: Object = {
    "model": {"uri": "hf://meta-llama/Llama-3.1-8B"},
    "tiers": {"serve": {"minReplicas": 1, "pod": {"nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-H200"}}}},
    "slo": {"ttft": "500ms", "tpot": "30ms", "itl": "40ms"},
}
CHUNK = ["--max-num-batched-tokens", "1024"]
LINE = "serve: --max-num-batched-tokens=1024 (itl 40ms)"


async def default_args(world: ControllerHarness) -> list[str]:
    """What the launcher of new engines is given before the user's arguments."""
    live = await world.get("Deployment", "chat-serve")
    environment = live["spec"]["template"]["spec"]["containers"][0]["env"]
    found: list[str] = json.loads(next(one["value"] for one in environment if one["name"] == "PLIMSOLL_DEFAULT_ARGS"))
    return found


async def messages(world: ControllerHarness) -> list[str]:
    items, _ = await world.kube.list(EVENTS, world.namespace)
    return [item["message"] for item in items if item["reason"] == "EngineTuned"]


def value(world: ControllerHarness) -> float | None:
    series = {"service": f"{world.namespace}/chat", "tier": "serve", "argument": "max-num-batched-tokens"}
    return operator_metrics.OPERATOR.get_sample_value("plimsoll_operator_engine_tuning", series)


async def edit(world: ControllerHarness, made: Object, **spec: Any) -> None:
    await world.edit({**made, "spec": {**made["spec"], **spec}})


async def generation(world: ControllerHarness) -> int:
    found: int = (await world.get("Deployment", "chat-serve"))["metadata"]["generation"]
    return found


async def test_new_service_is_tuned_and_says_why(world: ControllerHarness) -> None:
    await world.create(**SPEC)
    parts = await world.reconcile_once("chat")
    assert await default_args(world) == [*CHUNK, "--enforce-eager"]
    assert (await world.service())["status"]["engineTuning"] == LINE
    (message,) = await messages(world)
    assert message.startswith("serve: new engines get --max-num-batched-tokens=1024 (itl 40ms); explain says why")
    assert value(world) == 1024
    await world.sync(parts.store)
    explained = parts.scaler.explain((world.namespace, "chat"))
    assert explained is not None
    (row,) = explained["tiers"]["serve"]["tuning"]
    assert (row["argument"], "by data sheets" in row["reason"]) == (LINE.removeprefix("serve: "), True)


async def test_tuned_engines_are_left_alone_until_user_asks(world: ControllerHarness) -> None:
    made = await world.create(**SPEC)
    await world.reconcile_once("chat")
    first = await generation(world)
    await edit(world, made, slo={**SPEC["slo"], "itl": "900ms"})
    defaults = EngineDefaults(args=("--max-num-batched-tokens", "4096"))
    engine = builders.PLATFORM.engine.model_copy(update={"defaults": defaults})
    world.platform = builders.PLATFORM.model_copy(update={"engine": engine})
    for _ in range(2):
        await world.reconcile_once("chat")
    assert (await generation(world), await default_args(world)) == (first, [*CHUNK, "--enforce-eager"])
    assert len(await messages(world)) == 1
    world.platform = builders.PLATFORM
    parts = await world.reconcile_once("chat")
    await edit(world, made, engine={"tuning": "Off"})
    await world.reconcile_once("chat", parts)
    assert await default_args(world) == ["--enforce-eager"]
    assert "serve: new engines are not tuned" in await messages(world)
    assert ("engineTuning" in (await world.service())["status"], value(world)) == (False, None)
    await world.reconcile_once("chat")
    assert len(await messages(world)) == 2


async def test_user_argument_wins_and_status_says_so(world: ControllerHarness) -> None:
    made = await world.create(**SPEC, engine={"tuning": "Auto", "args": ["--max-num-batched-tokens=2048"]})
    await world.reconcile_once("chat")
    assert await default_args(world) == ["--enforce-eager"]
    status = (await world.service())["status"]
    assert status["engineTuning"] == "serve: none, because engine.args has --max-num-batched-tokens"
    assert (await messages(world), value(world)) == ([], None)
    await edit(world, made, engine={"tuning": "Off"})
    await world.reconcile_once("chat")
    assert "engineTuning" not in (await world.service())["status"]
    template = (await world.get("Deployment", "chat-serve"))["spec"]["template"]
    assert labels.TUNING not in template["metadata"].get("annotations", {})


async def test_metric_ends_with_service(world: ControllerHarness) -> None:
    await world.create(**SPEC)
    parts = await world.reconcile_once("chat")
    assert value(world) == 1024
    parts.store.replace(labels.KIND, ())
    await parts.reconciler.reconcile((world.namespace, "chat"))
    assert value(world) is None


async def test_measured_chunk_is_rolled_out_once_and_undone(world: ControllerHarness) -> None:
    made = await world.create(**SPEC, engine={"tuning": "Auto"})
    parts = await world.reconcile_once("chat")
    first = await world.get("Deployment", "chat-serve")
    spec_name = objects.revision_name(parse(made), "serve")

    async def reconcile_with(wanted: MeasuredChunk | None) -> Object:
        report = replace(initial_report(None, 0.0), measured_chunk=wanted)
        parts.reconciler._report = lambda key: report
        await world.sync(parts.store)
        await parts.reconciler.reconcile((world.namespace, "chat"))
        return await world.get("Deployment", "chat-serve")

    changed = await reconcile_with(MeasuredChunk(spec_name, 2048, "measured steps say so", 1.0))
    assert await default_args(world) == ["--max-num-batched-tokens", "2048", "--enforce-eager"]
    text = "--max-num-batched-tokens=2048 (measured)"
    assert (await world.service())["status"]["engineTuning"] == f"serve: {text}"
    assert f"serve: new engines get {text}: measured steps say so" in await messages(world)
    assert value(world) == 2048
    again = await reconcile_with(None)
    assert again["metadata"]["generation"] == changed["metadata"]["generation"]
    undone = await reconcile_with(MeasuredChunk(spec_name, 0, "fewer minutes within the SLO", 2.0))
    assert undone["spec"]["template"] == first["spec"]["template"]
    assert sum("fewer minutes" in message for message in await messages(world)) == 1
