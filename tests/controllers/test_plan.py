"""Which kept pod template a tier goes on with."""

from __future__ import annotations

import json
from typing import Any

from plimsoll.api.v1alpha1 import parse
from plimsoll.controllers.gateway_poller import GatewayView
from plimsoll.controllers.object_cache import ObjectCache
from plimsoll.controllers.reconcile.object_plan import ObjectPlan, plan_objects
from plimsoll.controllers.reconcile.observe import ObservedService, observe
from plimsoll.resources import lora, objects
from tests import builders

Object = dict[str, Any]

MODEL = {"uri": "file:///models/tiny"}


def planned(raw: Object, *children: Object) -> ObjectPlan:
    """The plan for a service with these objects."""
    store = ObjectCache()
    for obj in (raw, *children):
        store.put(obj)
    observed = observe(store, GatewayView(), ("team", "chat"))
    assert isinstance(observed, ObservedService)
    return plan_objects(observed, parse(raw), dict.fromkeys(("prefill", "decode", "serve"), 1), builders.PLATFORM)


def templates(found: ObjectPlan) -> dict[str, Object]:
    """The pod template of each Deployment."""
    return {obj["metadata"]["name"]: obj["spec"]["template"] for obj in found.desired if obj["kind"] == "Deployment"}


def named(name: str) -> Object:
    return builders.service(model={**MODEL, "name": name})


def test_plan_new_model_name_keeps_template() -> None:
    before = planned(named("old"))
    after = planned(named("new"), *before.templates)
    assert after.templates == ()
    assert after.revisions == before.revisions
    assert templates(after) == templates(before)


def test_plan_earlier_revision_keeps_its_template() -> None:
    raw = named("old")
    earlier = []
    for kept in planned(raw).templates:
        kind = kept["metadata"]["labels"]["plimsoll.dev/role"]
        name = objects.earlier_revision_name(parse(raw), kind)
        earlier.append({**kept, "metadata": {**kept["metadata"], "name": name}, "data": {"rendered": "before"}})
    first = planned(raw, *earlier)
    assert set(map(json.dumps, templates(first).values())) == {'{"rendered": "before"}'}
    renamed = planned(named("new"), *first.templates)
    assert (renamed.templates, templates(renamed)) == ((), templates(first))


def test_plan_keeps_config_map_that_a_pod_mounts() -> None:
    """A pod of the old template that is created during the rollout needs it."""
    raw = builders.service(tiers={"serve": {}})
    adapted = {**raw, "spec": {**raw["spec"], "adapters": [{"name": "sql", "uri": "hf://acme/sql"}]}}
    config_map = lora.config_map(parse(adapted), adapted)
    config_map["metadata"] |= {"uid": "uid-adapters", "resourceVersion": "7"}
    pod = builders.pod(raw, "serve") | {"spec": {"volumes": lora.volumes(parse(adapted))}}
    assert planned(raw, config_map, pod).prune == ()
    assert planned(raw, config_map, builders.pod(raw, "serve")).prune == (config_map,)
