"""What the status lists and what gateways answer agree while names change, however late a gateway learns of it."""

from __future__ import annotations

import copy
import json
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

import pytest

from plimsoll.controllers.gateway_poller import GatewayView
from plimsoll.controllers.object_cache import ObjectCache
from plimsoll.controllers.reconcile.model_names import FORMER_SECONDS
from plimsoll.controllers.reconcile.name_claims import grant_time
from plimsoll.controllers.reconcile.observe import NO_RULES, observe
from plimsoll.controllers.reconcile.reconciler import names_of
from plimsoll.core.routing.model_names import format_record, read_claim
from plimsoll.gateway.identity import ANONYMOUS
from plimsoll.gateway.picker import Picker
from plimsoll.gateway.routes import models_body
from plimsoll.gateway.service_catalog import ServiceCatalog
from tests import builders
from tests.gateway.kube_objects import build_catalog

Object = dict[str, Any]

SERVICES = ("one", "two", "three")
NAMES = ("chat", "big", "small", None)
GATEWAYS = 2


class World:
    """An operator and gateways that see the same services; each gateway as late as the test wants."""

    def __init__(self) -> None:
        self.store = ObjectCache()
        self.at = datetime(2026, 1, 1, tzinfo=UTC)
        self.gateways: list[ServiceCatalog] = []
        for number, name in enumerate(SERVICES):
            raw = builders.service(name)
            raw["metadata"]["creationTimestamp"] = f"2026-01-0{number + 1}T00:00:00Z"
            self.store.put(raw)
        self.gateways = [build_catalog([], [])] * GATEWAYS

    @property
    def objects(self) -> list[Object]:
        return self.store.all("InferenceService")

    def claim(self, service: str, name: str | None) -> None:
        """A user sets or removes the name of a service."""
        raw = copy.deepcopy(next(o for o in self.objects if o["metadata"]["name"] == service))
        raw["spec"]["model"] = {"uri": "file:///models/tiny", **({"name": name} if name else {})}
        self.store.put(raw)

    def follow(self, gateway: int) -> None:
        """A gateway sees all objects as they are now."""
        self.gateways[gateway] = build_catalog(copy.deepcopy(self.objects), [])

    def reconcile(self) -> None:
        """The operator brings the status of every service up to date."""
        reported = [{tuple(key.split("/")): set(s.names) for key, s in g.services.items()} for g in self.gateways]
        keys = set().union(*reported)
        common = {key: frozenset(set.intersection(*(one.get(key, set()) for one in reported))) for key in keys}
        view = GatewayView(GATEWAYS, GATEWAYS, models=common)  # type: ignore[arg-type]
        for key in [(raw["metadata"]["namespace"], raw["metadata"]["name"]) for raw in self.objects]:
            self.grant(key)
            observed = observe(self.store, view, key)
            assert observed is not None
            found = names_of(observed, self.at)
            names = {"modelNames": list(found.listed), "formerNames": [str(one) for one in found.former]}
            raw = copy.deepcopy(observed.service_object)
            self.store.put({**raw, "status": raw.get("status", {}) | names})

    def grant(self, key: tuple[str, str]) -> None:
        """The operator records, keeps or withdraws the grant of one service."""
        raw = copy.deepcopy(self.store.get("InferenceService", key))
        assert raw is not None
        claim = read_claim(raw)
        assert claim is not None
        since = grant_time(claim, self.store.claims_of(claim.names), NO_RULES, self.at)
        record = None if since is None else format_record(claim.model, since)
        self.store.put({**raw, "status": raw.get("status", {}) | {"nameClaim": record}})

    def settle(self) -> None:
        """Everybody sees everything."""
        for _ in range(4):
            for gateway in range(GATEWAYS):
                self.follow(gateway)
            self.reconcile()

    def listed(self) -> dict[str, list[str]]:
        """The names in the status of each service."""
        return {o["metadata"]["name"]: list((o.get("status") or {}).get("modelNames", ())) for o in self.objects}


def ids(known: ServiceCatalog) -> set[str]:
    """The names in a gateway's list of models."""
    picker = Picker(Random(1))
    picker.set_catalog(known)
    return {model["id"] for model in json.loads(models_body(picker, ANONYMOUS))["data"]}


@pytest.mark.parametrize("seed", range(40))
def test_names_listed_in_a_status_are_always_answered(seed: int) -> None:
    draw, world = Random(seed), World()
    world.settle()
    for _ in range(120):
        act = draw.choice(("claim", "follow", "follow", "reconcile", "wait"))
        if act == "claim":
            world.claim(draw.choice(SERVICES), draw.choice(NAMES))
        elif act == "follow":
            world.follow(draw.randrange(GATEWAYS))
        elif act == "reconcile":
            world.reconcile()
        else:
            world.at += timedelta(seconds=draw.choice((1.0, FORMER_SECONDS)))
        expected = {name for names in world.listed().values() for name in names}
        missing = [expected - set(known.by_name) for known in world.gateways]
        assert missing == [set()] * GATEWAYS


@pytest.mark.parametrize("seed", range(20))
def test_names_settled_status_equals_what_gateways_list(seed: int) -> None:
    draw, world = Random(seed), World()
    for _ in range(10):
        world.claim(draw.choice(SERVICES), draw.choice(NAMES))
        world.settle()
        for known in world.gateways:
            answered = {service.name: list(service.names) for service in known.services.values()}
            assert {name: set(names) for name, names in answered.items()} == {
                name: set(names) for name, names in world.listed().items()
            }
            assert ids(known) == {names[0] for names in world.listed().values()}
    world.at += timedelta(seconds=FORMER_SECONDS)
    world.settle()
    assert all(len(names) <= 2 for names in world.listed().values())
