"""Any object that a cluster can hold, through every function that reads one: none raises.

An object starts whole. Then fields are removed, set to null, emptied, or get values that a later version may have.
"""

from __future__ import annotations

import asyncio
import base64
import copy
import json
import zlib
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plimsoll.adapters.kube import Kube, WatchEvent, _Lock
from plimsoll.adapters.normalize import normalize
from plimsoll.api import labels
from plimsoll.controllers import drift, starts, status, troubles, victims
from plimsoll.controllers.autoscale import Autoscaler, Sources
from plimsoll.controllers.endings import Endings, of_pod
from plimsoll.controllers.engines import Engines
from plimsoll.controllers.gateways import Gateways, View
from plimsoll.controllers.observe import observe, rivals
from plimsoll.controllers.plan import plan
from plimsoll.controllers.reconcile import desired, sight_of
from plimsoll.controllers.status import TierSight
from plimsoll.controllers.store import Store
from plimsoll.core.scaling.leaving import Load
from plimsoll.gateway.endpoints import fleet
from plimsoll.resources import meta
from tests import builders
from tests.controllers.test_autoscale import NOW_S, _tell

Object = dict[str, Any]
Path = tuple[str | int, ...]

KEY = ("team", "chat")
# What a stored object always has: the API server refuses one without them, or sets them itself.
ALWAYS = {("metadata",), ("kind",), ("apiVersion",)} | {
    ("metadata", name) for name in ("name", "namespace", "uid", "creationTimestamp")
}
# What a later version of a definition may do to the status of a custom resource: nothing holds its types.
LATER: tuple[Any, ...] = ("FromALaterVersion", 7, True, [1, "x", None], {"odd": {"deep": None}}, 1e300)


def a_service() -> Object:
    learned = base64.b64encode(zlib.compress(json.dumps({"version": 1, "tiers": {"serve": {}}}).encode())).decode()
    found = builders.service(
        model={"uri": "file:///models/tiny", "name": "tiny"},
        slo={"ttft": "2s", "tpot": "50ms"},
        tiers={"serve": {"minReplicas": 1, "maxReplicas": 4}},
        engine={"args": ["--max-num-seqs", "8"]},
        admission={"whenFull": "Downgrade", "fallback": {"name": "other"}},
    )
    found["metadata"] |= {"labels": {"team": "a"}, "annotations": {"note": "b"}, "managedFields": [{"manager": "x"}]}
    moves = {"serve": {"from": 1, "to": 2, "why": "w"}}
    decision = {"time": "2026-01-01T00:00:00Z", "tiers": moves, "binding": "serve"}
    found["status"] = {
        "observedGeneration": 1,
        "conditions": [
            {"type": "Ready", "status": "True", "reason": "Serving", "lastTransitionTime": "2026-01-01T00:00:00Z"},
            {"type": "SLOMet", "status": "False", "reason": "PromiseBroken", "message": "m"},
        ],
        "learned": {"zlib": learned},
        "lastDecision": decision,
        "decisions": [decision],
        "admission": {
            "version": 3, "classes": ["default"], "limits": None, "readyAt": 1.0, "readyWork": 2.0, "starting": True,
            "shares": {"gw": 1}, "starts": [[1.0, 2.0]],
        },
        "tiers": {"serve": {"replicas": 1, "ready": 1, "desired": 1, "summary": "1/1", "revision": "r"}},
        "modelNames": ["tiny"],
        "url": "http://x",
    }  # fmt: skip
    return found


def a_pod() -> Object:
    found = builders.pod(a_service(), "serve")
    found["metadata"] |= {
        "creationTimestamp": "2026-01-01T00:00:00Z",
        "annotations": {victims.MARK: "-1"},
        "ownerReferences": [{"uid": "u", "kind": "ReplicaSet", "name": "r", "controller": True}],
    }
    found["spec"] = {
        "containers": [
            {
                "name": "engine",
                "image": "example.com/engine:1",
                "env": [{"name": "MODEL", "value": "m"}, {"name": "T", "valueFrom": {"secretKeyRef": {"key": "k"}}}],
                "resources": {"limits": {"nvidia.com/gpu": "1"}},
                "ports": [{"name": "api", "containerPort": 8000}],
            }
        ],
        "nodeSelector": {"gpu": "h200"},
    }
    state = {
        "terminated": {"exitCode": 137, "reason": "Error", "finishedAt": "2026-01-01T00:10:25Z", "message": "m"},
        "waiting": {"reason": "ErrImagePull", "message": "m"},
        "running": {"startedAt": "2026-01-01T00:00:05Z"},
    }
    container = {"name": "engine", "image": "i", "ready": False, "state": state, "lastState": copy.deepcopy(state)}
    found["status"] = {
        "phase": "Running",
        "podIP": "10.0.0.1",
        "conditions": [
            {"type": "PodScheduled", "status": "True", "lastTransitionTime": "2026-01-01T00:00:01Z", "message": "m"},
            {"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:01:00Z", "reason": "r"},
        ],
        "containerStatuses": [container],
        "initContainerStatuses": [copy.deepcopy(container)],
    }
    return found


def a_leaving_pod() -> Object:
    found = a_pod()
    found["metadata"] |= {"deletionTimestamp": "2026-01-01T00:10:25Z", "deletionGracePeriodSeconds": 625}
    return found


def a_deployment() -> Object:
    found = builders.deployment(a_service(), "serve", replicas=2, ready=1)
    found["spec"]["template"] = {"metadata": {"labels": {}}, "spec": a_pod()["spec"]}
    found["metadata"]["managedFields"] = [{"manager": "kubectl", "fieldsV1": {"f:spec": {"f:replicas": {}}}}]
    found["status"]["conditions"] = [{"type": "ReplicaFailure", "status": "True", "message": "quota"}]
    return found


def a_revision() -> Object:
    parent = a_service()
    return {
        "kind": "ControllerRevision",
        "metadata": {**meta.metadata(parent, "chat-serve-1", meta.tier_labels("chat", "serve")), "uid": "r"},
        "data": {"spec": {}},
        "revision": 1,
    }


def a_lease() -> Object:
    times = {"acquireTime": "2026-01-01T00:00:00.000001Z", "renewTime": "2026-01-01T00:00:00.000001Z"}
    spec = {"holderIdentity": "other", "leaseDurationSeconds": 15, "leaseTransitions": 3, **times}
    return {"kind": "Lease", "metadata": {"name": "plimsoll-operator", "namespace": "n", "uid": "l"}, "spec": spec}


def paths(value: Any, at: Path = ()) -> Iterator[Path]:
    """The paths of all fields and items of an object."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, part in parts:
        yield (*at, name)
        yield from paths(part, (*at, name))


def damaged(whole: Object, draw: Random) -> Object:
    """The object with some optional fields changed in ways that the API allows."""
    found = copy.deepcopy(whole)
    free = [p for p in paths(whole) if p not in ALWAYS and labels.SERVICE not in p and labels.ROLE not in p]
    for path in draw.sample(free, draw.choice([1, 1, 2, 4])):
        *way, last = path
        holder: Any = found
        try:
            for name in way:
                holder = holder[name]
            _damage(holder, last, draw, loose=whole["kind"] == labels.KIND and path[0] == "status")
        except (KeyError, IndexError, TypeError):
            continue  # an earlier change has removed it
    return found


def _damage(holder: Any, last: Any, draw: Random, *, loose: bool) -> None:
    old = holder[last]
    empty: Any = {dict: {}, list: [], str: ""}.get(type(old))
    match draw.choice(["remove", "null", "empty", "extra", "later"]):
        case "remove" if isinstance(holder, dict):
            del holder[last]
        case "null":
            holder[last] = None
        case "empty" if empty is not None and "T00:" not in old:
            holder[last] = empty
        case "extra" if isinstance(old, dict):
            old["fieldOfALaterVersion"] = draw.choice(LATER)
        case "later" if loose:
            holder[last] = copy.deepcopy(draw.choice(LATER))
        case "later" if isinstance(old, str):
            holder[last] = "2027-01-01T00:00:00.123456+02:00" if "T00:" in old else "FromALaterVersion"


def stored(*objects: Object) -> Store:
    store = Store()
    for obj in (a_service(), a_deployment(), *objects):
        store.put(normalize(copy.deepcopy(obj)))
    return store


def round_of(store: Store) -> None:
    """A round of the reconciler without its writes."""
    seen = observe(store, View(), KEY)
    todo = None
    if seen is not None and seen.service is not None:
        todo = plan(seen, seen.service, desired(seen, seen.service, None), builders.PLATFORM)
    if seen is not None:
        sight = sight_of(seen, todo, None, None, builders.PLATFORM)
        old = seen.raw.get("status") or {}
        status.events(old.get("conditions", []), status.conditions(sight))
        status.tiers(sight)
        status.scaling(sight, old)


def ticks_of(store: Store) -> None:
    """Two ticks of the autoscaler, without the isolation of services."""
    sources = Sources(lambda: ((), ()), lambda pod: None, lambda pod: None)
    scaler = Autoscaler(store, Kube.__new__(Kube), sources, _tell, lambda key: None)
    for second in range(2):
        scaler.decide(NOW_S + second)
    for known in scaler._known.values():
        assert known.failed_s < NOW_S


def in_engines(pod: Object) -> None:
    engines = Engines(stored(pod), lambda *_: asyncio.sleep(0, b""), lambda *_: None)
    engines._look(0.0)


def in_gateways(pod: Object) -> None:
    gateways = Gateways(None, builders.PLATFORM.gateway, lambda *_: asyncio.sleep(0, b""), lambda key: None)  # type: ignore[arg-type]
    for event in (WatchEvent("SYNC", {}, (pod,)), WatchEvent("MODIFIED", pod), WatchEvent("DELETED", pod)):
        gateways.saw(event)


def in_endings(pod: Object) -> None:
    endings = Endings(stored(pod))
    for event in (WatchEvent("SYNC", {}, (pod,)), WatchEvent("MODIFIED", pod), WatchEvent("DELETED", pod)):
        endings.hear(event)
    endings.forget(KEY)


def in_a_smaller_tier(pod: Object) -> None:
    other = {**pod, "metadata": {**pod["metadata"], "name": "q"}}
    assert victims.choose([pod, other], 1, lambda name: Load(0.0, 0.0)).words is not None


def in_a_start(pod: Object) -> None:
    starts.starting(pod, None)
    starts.took(pod, None)
    starts.ready_for_s(pod, NOW_S)
    starts.variant(pod)
    assert starts.is_leaving(pod) in (True, False)


def in_the_lease(lease: Object) -> None:
    from kubernetes.aio import client

    class Answer:
        data = json.dumps(lease)

    found = client.ApiClient(client.Configuration())._ApiClient__deserialize(json.loads(Answer.data), "V1Lease")
    _Lock("n", "ns", "me", None).election_record(found)


PODS: dict[str, Callable[[Object], object]] = {
    "store": stored,
    "endings": in_endings,
    "ending of a pod": of_pod,
    "starts": in_a_start,
    "troubles": lambda pod: troubles.worst(None, [pod]),
    "victims": in_a_smaller_tier,
    "engines": in_engines,
    "gateways": in_gateways,
    "reconcile": lambda pod: round_of(stored(pod)),
    "autoscale": lambda pod: ticks_of(stored(pod)),
    "gateway": lambda pod: fleet([a_service()], [pod]),
}
DEPLOYMENTS: dict[str, Callable[[Object], object]] = {
    "store": stored,
    "drift": lambda obj: (drift.looks(obj), drift.replicas_owned_elsewhere(obj)),
    "rollout": lambda obj: status.rolled_out(TierSight("serve", 2, obj, (), "r")),
    "troubles": lambda obj: troubles.worst(obj, []),
    "reconcile": lambda obj: round_of(stored(obj)),
    "autoscale": lambda obj: ticks_of(stored(obj)),
}
SERVICES: dict[str, Callable[[Object], object]] = {
    "store": lambda obj: stored(obj).typed(obj),
    "rivals": lambda obj: rivals(stored(obj), None, obj),
    "reconcile": lambda obj: round_of(stored(obj)),
    "autoscale": lambda obj: ticks_of(stored(obj)),
    "gateway": lambda obj: fleet([obj], [a_pod()]),
}
READERS = [
    *(pytest.param(a_pod, read, id=f"Pod, {name}") for name, read in PODS.items()),
    *(pytest.param(a_leaving_pod, PODS[name], id=f"leaving Pod, {name}") for name in ("ending of a pod", "endings")),
    *(pytest.param(a_deployment, read, id=f"Deployment, {name}") for name, read in DEPLOYMENTS.items()),
    *(pytest.param(a_service, read, id=f"InferenceService, {name}") for name, read in SERVICES.items()),
    pytest.param(a_revision, lambda obj: round_of(stored(obj)), id="ControllerRevision, reconcile"),
    pytest.param(a_lease, in_the_lease, id="Lease, election"),
]


@pytest.mark.parametrize(("whole", "read"), READERS)
@settings(max_examples=150, deadline=None)
@given(draw=st.randoms(use_true_random=False))
def test_reader_of_any_object_does_not_raise(
    whole: Callable[[], Object], read: Callable[[Object], object], draw: Random
) -> None:
    read(normalize(damaged(whole(), draw)))
