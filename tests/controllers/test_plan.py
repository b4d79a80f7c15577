"""Which kept pod template a tier goes on with."""

from __future__ import annotations

import json
from typing import Any

from plimsoll.api.v1alpha1 import parse
from plimsoll.controllers.gateways import View
from plimsoll.controllers.observe import Observed, observe
from plimsoll.controllers.plan import Plan, plan
from plimsoll.controllers.store import Store
from plimsoll.resources import objects
from tests import builders

Object = dict[str, Any]

MODEL = {"uri": "file:///models/tiny"}


def planned(raw: Object, *revisions: Object) -> Plan:
    """The plan for a service with these ControllerRevisions."""
    store = Store()
    for obj in (raw, *revisions):
        store.put(obj)
    seen = observe(store, View(), ("team", "chat"))
    assert isinstance(seen, Observed)
    return plan(seen, parse(raw), {"prefill": 1, "decode": 1}, builders.PLATFORM)


def templates(found: Plan) -> dict[str, Object]:
    """The pod template of each Deployment."""
    return {obj["metadata"]["name"]: obj["spec"]["template"] for obj in found.wish if obj["kind"] == "Deployment"}


def named(name: str) -> Object:
    return builders.service(model={**MODEL, "name": name})


def test_plan_new_model_name_keeps_template() -> None:
    before = planned(named("old"))
    after = planned(named("new"), *before.keep)
    assert after.keep == ()
    assert after.revisions == before.revisions
    assert templates(after) == templates(before)


def test_plan_earlier_revision_keeps_its_template() -> None:
    raw = named("old")
    earlier = []
    for kept in planned(raw).keep:
        kind = kept["metadata"]["labels"]["plimsoll.dev/role"]
        name = objects.earlier_revision_name(parse(raw), kind)
        earlier.append({**kept, "metadata": {**kept["metadata"], "name": name}, "data": {"rendered": "before"}})
    first = planned(raw, *earlier)
    assert set(map(json.dumps, templates(first).values())) == {'{"rendered": "before"}'}
    renamed = planned(named("new"), *first.keep)
    assert (renamed.keep, templates(renamed)) == ((), templates(first))
