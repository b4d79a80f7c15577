"""A granted model name never moves: edits, deletions, restarts, outages, late watches, lost writes."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

import pytest

from plimsoll.adapters.kube_client import KubeClient, Resource
from plimsoll.controllers.object_cache import Key, ObjectCache, key_of
from plimsoll.controllers.reconcile.name_claims import NameGrants
from plimsoll.controllers.reconcile.service_namespaces import CONFIGMAP_NAME, ServiceNamespaces
from plimsoll.core.errors import BackendUnavailable, Conflict, Forbidden, NotFound, ObjectRejected
from plimsoll.core.routing.model_names import NameRules, read_claim, resolve_owners
from tests import builders
from tests.gateway.kube_objects import build_catalog

Object = dict[str, Any]

BANK, EVIL = ("bank", "chat"), ("evil", "old")


class MemoryKube(KubeClient):
    """An API server with ConfigMaps alone."""

    def __init__(self) -> None:
        self.stored: Object | None = None
        self.error: Exception | None = None
        self.writes = 0

    async def get(self, resource: Resource, namespace: str | None, name: str) -> Object:
        if self.error is not None:
            raise self.error
        if self.stored is None:
            raise NotFound(name)
        return self.stored

    async def apply(self, obj: Object, manager: str, *, force: bool = True, subresource: str | None = None) -> Object:
        self.writes += 1
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        self.stored = obj
        return obj


class World:
    """Services of an API server, an operator whose watch is late, and what a gateway at each version would serve."""

    def __init__(self, draw: Random | None = None, short_name_namespaces: Iterable[str] = ()) -> None:
        self.draw = draw or Random(0)
        self.short_name_namespaces = frozenset(short_name_namespaces)
        self.now = datetime(2026, 1, 1, tzinfo=UTC)
        self.live: dict[Key, Object] = {}
        self.log: list[tuple[Object, bool]] = []  # each version, and whether it is a deletion
        self.version = 0
        self.faults = 0.0  # chance that a write fails, half of the time after it was done
        self.kube = MemoryKube()
        self.requeued: list[Key] = []
        self.holders: dict[str, str] = {}  # name -> UID of its holder, in the newest version
        self.start_operator()

    def start_operator(self) -> None:
        """A new operator process, which lists first."""
        self.cache, self.observed = ObjectCache(), len(self.log)
        for obj in self.live.values():
            self.cache.put(copy.deepcopy(obj))
        self.namespaces = ServiceNamespaces(self.kube, "plimsoll-system")
        self.grants = NameGrants(
            self.cache, self.short_name_namespaces, self.namespaces, self.write_status, self.requeued.append, self.tick
        )

    def tick(self) -> datetime:
        """The operator's clock, which sometimes goes back."""
        self.now += timedelta(seconds=self.draw.choice((0.0, 0.000_001, 1.0)))
        return self.now

    def store(self, obj: Object, *, deleted: bool = False) -> Object:
        """A new version of an object. Checks that it moves no granted name."""
        self.version += 1
        self.now += timedelta(microseconds=1)
        obj = copy.deepcopy(obj)
        obj["metadata"]["resourceVersion"] = str(self.version)
        self.live[key_of(obj)] = obj
        if deleted:
            del self.live[key_of(obj)]
        self.log.append((obj, deleted))
        self.check()
        return obj

    def check(self) -> None:
        """No name leaves a live holder that still claims it, and no gateway serves it elsewhere."""
        claims = {obj["metadata"]["uid"]: claim for obj in self.live.values() if (claim := read_claim(obj)) is not None}
        uids = {claim.qualified_name: uid for uid, claim in claims.items()}
        owners = resolve_owners(list(claims.values()))
        catalog = build_catalog(list(self.live.values()), [])
        for name, uid in self.holders.items():
            claim = claims.get(uid)
            if claim is not None and claim.model == name:
                assert uids[owners[name].qualified_name] == uid, f"{name} left {claim.qualified_name}"
                assert catalog.by_name[name].key == claim.qualified_name
        self.holders = {name: uids[claim.qualified_name] for name, claim in owners.items() if claim.granted == name}

    def create(self, key: Key, model: str | None = None, created: str = "2026-01-01T00:00:00Z") -> None:
        obj = builders.service(key[1], key[0], model={"uri": "file:///m", **({"name": model} if model else {})})
        obj["metadata"] |= {"uid": f"{key}-{self.version}", "creationTimestamp": created}
        self.store(obj)

    def edit(self, key: Key, model: str | None) -> None:
        obj = copy.deepcopy(self.live[key])
        obj["spec"]["model"] = {"uri": "file:///m", **({"name": model} if model else {})}
        self.store(obj)

    def delete(self, key: Key, *, foreground: bool = False) -> None:
        obj = copy.deepcopy(self.live[key])
        obj["metadata"]["deletionTimestamp"] = "2026-06-01T00:00:00Z"
        self.store(obj, deleted=not foreground)

    async def write_status(self, raw: Object, status: Object) -> None:
        """As the reconciler does: of this version alone; the answer goes into the cache."""
        await asyncio.sleep(0)
        is_lost = self.draw.random() < self.faults
        if is_lost and self.draw.random() < 0.5:
            raise BackendUnavailable("not done")
        live = self.live.get(key_of(raw))
        if live is None:
            return
        if live["metadata"]["resourceVersion"] != raw["metadata"]["resourceVersion"]:
            raise Conflict("the object has been modified")
        stored = self.store({**live, "status": copy.deepcopy(status)})
        await asyncio.sleep(0)
        if is_lost:
            raise BackendUnavailable("done, but the answer was lost")
        self.cache.put(copy.deepcopy(stored))

    def watch(self, events: int) -> None:
        """The operator's watch goes on by some versions."""
        for obj, deleted in self.log[self.observed : self.observed + events]:
            (self.cache.remove if deleted else self.cache.put)(copy.deepcopy(obj))
        self.observed = min(len(self.log), self.observed + events)

    async def update(self, *keys: Key) -> None:
        """The operator's workers reconcile these services at once."""
        results = await asyncio.gather(*(self.grants.update(key) for key in keys), return_exceptions=True)
        for result in results:
            assert result is None or isinstance(result, (Conflict, BackendUnavailable)), result

    async def settle(self) -> None:
        """Everything is seen, and reconciled until nothing changes."""
        for _ in range(4):
            self.watch(len(self.log))
            await self.update(*self.live)

    def served(self) -> dict[str, str]:
        """The names that a gateway serves, with the service of each."""
        return {name: service.key for name, service in build_catalog(list(self.live.values()), []).by_name.items()}

    def rules(self) -> NameRules:
        return self.grants.rules


async def test_grant_stays_when_older_service_claims_it() -> None:
    world = World()
    world.create(BANK, created="2026-03-01T00:00:00Z")
    world.create(EVIL, "playground", created="2026-01-01T00:00:00Z")
    await world.settle()
    world.edit(EVIL, "chat")
    assert world.served()["chat"] == "bank/chat"
    await world.settle()
    world.start_operator()
    await world.settle()
    assert world.served()["chat"] == "bank/chat"


async def test_grant_of_recreated_service_stays_in_its_namespace() -> None:
    world = World()
    world.create(BANK)
    world.create(EVIL, "bank/chat")
    await world.settle()
    for foreground in (True, False):
        world.delete(BANK, foreground=foreground)
        await world.settle()
        assert "bank/chat" not in world.served()
        world.start_operator()
        await world.namespaces.load()
        await world.settle()
        assert "bank/chat" not in world.served()
    world.create(("evil", "late"), "bank/chat")
    await world.settle()
    assert "bank/chat" not in world.served()
    world.create(BANK)
    await world.settle()
    assert world.served()["bank/chat"] == world.served()["chat"] == "bank/chat"


async def test_grant_like_hugging_face_id_outlasts_its_namespace() -> None:
    world, first, late = World(), ("team", "x"), ("openai", "gpt")
    world.create(first, "openai/gpt")
    await world.settle()
    assert world.served()["openai/gpt"] == "team/x"
    world.create(late)
    await world.settle()
    assert world.served() == {"openai/gpt": "team/x", "team/x": "team/x", "gpt": "openai/gpt"}
    world.delete(first)
    assert world.served()["openai/gpt"] == "openai/gpt"


async def test_grant_goes_to_next_when_freed() -> None:
    world, next_one = World(), ("team", "next")
    world.create(BANK)
    await world.settle()
    world.create(EVIL, "chat", created="2026-02-01T00:00:00Z")
    world.create(next_one, "chat", created="2026-01-15T00:00:00Z")
    await world.settle()
    assert world.served()["chat"] == "bank/chat"
    world.edit(BANK, "other")
    world.watch(len(world.log))
    world.requeued.clear()
    await world.update(BANK)
    assert next_one in world.requeued
    await world.settle()
    assert world.served()["chat"] == "team/next"


async def test_grant_without_status_goes_by_creation() -> None:
    """As after a backup is restored without status, or by GitOps into an empty cluster."""
    world = World()
    for n, key in enumerate((("c", "x"), ("a", "x"), ("b", "x"))):
        world.create(key, "chat", created=f"2026-01-0{1 + n // 2}T00:00:00Z")
    world.watch(len(world.log))
    await world.update(("b", "x"), ("c", "x"), ("a", "x"))
    await world.settle()
    assert world.served()["chat"] == "a/x"


async def test_grant_unknown_to_earlier_release_stays_with_who_serves() -> None:
    world = World()
    world.create(BANK, created="2026-03-01T00:00:00Z")
    world.store({**world.live[BANK], "status": {"modelNames": ["chat", "bank/chat"]}})
    world.create(EVIL, "chat", created="2026-01-01T00:00:00Z")
    assert world.served()["chat"] == "bank/chat"
    await world.settle()
    assert world.served()["chat"] == "bank/chat"


async def test_grant_only_in_listed_namespaces() -> None:
    world = World(short_name_namespaces=["bank"])
    world.create(EVIL, "chat")
    await world.settle()
    world.create(BANK, created="2026-03-01T00:00:00Z")
    await world.settle()
    assert world.served() == {"chat": "bank/chat", "bank/chat": "bank/chat", "evil/old": "evil/old"}


async def test_grant_is_withdrawn_from_namespace_off_the_list() -> None:
    world = World()
    world.create(EVIL, "chat")
    await world.settle()
    assert world.served()["chat"] == "evil/old"
    world.short_name_namespaces = frozenset({"bank"})
    world.holders.clear()
    world.start_operator()
    await world.settle()
    assert world.served() == {"evil/old": "evil/old"}


async def test_grant_writes_once_and_keeps_the_rest() -> None:
    world = World()
    world.create(BANK)
    world.store({**world.live[BANK], "status": {"url": "http://g"}})
    await world.settle()
    version = world.version
    await world.settle()
    assert world.version == version
    assert world.live[BANK]["status"].keys() == {"url", "nameClaim"}
    assert world.live[BANK]["status"]["nameClaim"].partition(" since ")[2].startswith("2026-01-01T00:00:0")


@pytest.mark.parametrize("error", [Forbidden("no"), ObjectRejected("field not declared in schema")])
async def test_grant_that_cannot_be_recorded_stops_no_reconcile(error: Exception) -> None:
    world = World()
    world.create(BANK)
    world.watch(1)

    async def refuse(raw: Object, status: Object) -> None:
        raise error

    grants = NameGrants(world.cache, frozenset(), world.namespaces, refuse, world.requeued.append)
    await grants.update(BANK)
    assert world.requeued == []


SERVICES = [(namespace, name) for namespace in ("bank", "evil", "team") for name in ("chat", "old")]
MODELS = (None, "chat", "old", "bank/chat", "evil/old", "team/new", "openai/gpt", "Qwen/Qwen3-8B")


@pytest.mark.parametrize("seed", range(60))
async def test_grants_never_move_between_live_holders(seed: int) -> None:
    draw = Random(seed)
    world = World(draw)
    world.faults = draw.choice((0.0, 0.2))
    for _ in range(250):
        key, model = draw.choice(SERVICES), draw.choice(MODELS)
        match draw.choice(("user", "user", "delete", "watch", "watch", "update", "update", "restart")):
            case "user" if key in world.live:
                world.edit(key, model)
            case "user":
                world.create(key, model, f"2026-01-0{draw.randint(1, 9)}T00:00:00Z")
            case "delete" if key in world.live and draw.random() < 0.5:
                world.delete(key, foreground=draw.random() < 0.5)
            case "watch":
                world.watch(draw.randint(1, 5))
            case "update":
                await world.update(*draw.sample(SERVICES, 3))
            case "restart" if draw.random() < 0.2:
                world.start_operator()
                await world.namespaces.load()
    world.faults = 0.0
    await world.settle()
    expected = {
        read.model for obj in world.live.values() if (read := read_claim(obj)) and not world.rules().rejection(read)
    }
    assert expected <= set(world.served())


async def test_service_namespaces_outlast_operator() -> None:
    kube = MemoryKube()
    first = ServiceNamespaces(kube, "plimsoll-system")
    for namespace in ("bank", "team", "bank"):
        await first.add(namespace)
    assert kube.writes == 2
    assert kube.stored is not None
    assert kube.stored["metadata"] == {"namespace": "plimsoll-system", "name": CONFIGMAP_NAME}
    second = ServiceNamespaces(kube, "plimsoll-system")
    assert second.known == frozenset()
    await second.load()
    assert second.known == {"bank", "team"}


async def test_service_namespaces_of_services_at_once_are_all_kept() -> None:
    world = World()
    for key in SERVICES:
        world.create(key)
    world.watch(len(world.log))
    await world.update(*SERVICES)
    assert world.kube.stored is not None
    assert world.kube.stored["data"].keys() == {"bank", "evil", "team"}


@pytest.mark.parametrize("error", [NotFound("x"), Forbidden("x"), ObjectRejected("too large")])
async def test_service_namespaces_without_configmap_count(error: Exception) -> None:
    kube = MemoryKube()
    namespaces = ServiceNamespaces(kube, "plimsoll-system")
    if not isinstance(error, ObjectRejected):
        kube.error = error
        await namespaces.load()
    kube.error = error
    await namespaces.add("bank")
    assert namespaces.known == {"bank"}
    await namespaces.add("bank")
    assert kube.writes == 1


async def test_service_namespaces_outage_is_retried() -> None:
    kube = MemoryKube()
    kube.error = BackendUnavailable("away")
    namespaces = ServiceNamespaces(kube, "plimsoll-system")
    with pytest.raises(BackendUnavailable):
        await namespaces.load()
    with pytest.raises(BackendUnavailable):
        await namespaces.add("bank")
    assert namespaces.known == frozenset()


@pytest.mark.parametrize("data", [None, [], "x"])
async def test_service_namespaces_invalid_data_is_ignored(data: object) -> None:
    kube = MemoryKube()
    kube.stored = {"kind": "ConfigMap", "metadata": {}, "data": data}
    namespaces = ServiceNamespaces(kube, "plimsoll-system")
    await namespaces.load()
    assert namespaces.known == frozenset()
