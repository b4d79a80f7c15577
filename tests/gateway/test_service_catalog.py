"""Services and endpoints from API objects."""

from __future__ import annotations

import json
from random import Random

import pytest

from launcher import command
from launcher.contract import load
from plimsoll.core.admission.request import MAX_REQUEST_SEQUENCES
from plimsoll.core.routing.endpoint import Leaving
from plimsoll.core.types import Role
from plimsoll.engines.vllm import DEFAULT_MAX_NUM_SEQS
from plimsoll.gateway.service_catalog import RoutableCatalog
from tests.gateway.kube_objects import CatalogOfPods, Object, build_catalog, pod, service, with_healthy


def test_service_has_model_name_and_long_name() -> None:
    known = build_catalog([service(model="org/tiny-1.5")], [])
    assert set(known.by_name) == {"org/tiny-1.5", "team/chat"}
    assert known.services["team/chat"].names == ("org/tiny-1.5", "team/chat")
    assert known.services["team/chat"].created == 1767323045


def test_model_name_defaults_to_object_name() -> None:
    assert set(build_catalog([service()], []).by_name) == {"chat", "team/chat"}


def unrecorded(obj: Object) -> Object:
    """The object as it is before the operator has seen its spec."""
    return {key: value for key, value in obj.items() if key != "status"}


def test_unrecorded_name_waits_for_the_operator() -> None:
    known = build_catalog([unrecorded(service(model="tiny"))], [])
    assert known.services["team/chat"].names == ("team/chat",)


def test_edited_older_service_takes_no_model_name() -> None:
    bank = service("chat", "bank", creationTimestamp="2026-03-01T00:00:00Z")
    evil = unrecorded(service("old", "evil", "chat", creationTimestamp="2026-01-01T00:00:00Z"))
    known = build_catalog([evil, bank], [])
    assert known.by_name["chat"].key == "bank/chat"
    assert known.services["evil/old"].names == ("evil/old",)


def test_deleted_service_leaves_its_qualified_name_to_nobody() -> None:
    bank = service("chat", "bank", deletionTimestamp="2026-11-01T00:00:00Z")
    evil = unrecorded(service("x", "evil", "bank/chat"))
    assert set(build_catalog([bank, evil], []).by_name) == {"evil/x"}


def test_service_without_names_is_not_listed() -> None:
    first = service("x", "team", "openai/gpt")
    late = unrecorded(service("gpt", "openai", "taken"))
    known = build_catalog([first, late], [])
    assert known.by_name["openai/gpt"].key == "team/x"
    assert known.services["openai/gpt"].names == ()


def test_deleted_service_gives_up_model_name() -> None:
    old = service("one", model="tiny", deletionTimestamp="2026-06-01T00:00:00Z")
    new = service("two", model="tiny", creationTimestamp="2026-05-01T00:00:00Z")
    known = build_catalog([new, old], [])
    assert known.by_name["tiny"].name == "two"
    assert set(known.services) == {"team/two"}


def test_pods_become_endpoints_of_their_service() -> None:
    pods = [
        pod("10.0.0.1:8000", role="prefill"),
        pod("10.0.0.2:8000", role="decode", ready=False),
        pod("10.0.0.3:8000", role="decode", deletionTimestamp="2026-06-01T00:00:00Z"),
        pod("10.0.0.4:8000", role="decode"),
        pod("10.0.0.5:8000", service="other"),
        pod("10.0.0.6:8000", namespace="elsewhere"),
    ]
    found = build_catalog([service()], pods).services["team/chat"]
    assert {(e.address, e.role, e.ready, e.leaving is not Leaving.NO) for e in found.endpoints} == {
        ("10.0.0.1:8000", Role.PREFILL, True, False),
        ("10.0.0.2:8000", Role.DECODE, False, False),
        ("10.0.0.3:8000", Role.DECODE, True, True),
        ("10.0.0.4:8000", Role.DECODE, True, False),
    }
    assert [e.address for e in found.serving_endpoints] == ["10.0.0.4:8000"]


def without_address() -> Object:
    made = pod("10.0.0.1:8000")
    del made["status"]["podIP"]
    return made


def finished() -> Object:
    made = pod("10.0.0.1:8000")
    made["status"]["phase"] = "Failed"
    return made


@pytest.mark.parametrize("odd", [without_address(), finished(), pod("10.0.0.1:8000", role="other")])
def test_unusable_pods_are_not_endpoints(odd: Object) -> None:
    assert build_catalog([service()], [odd]).services["team/chat"].endpoints == ()


def test_endpoint_port_is_pod_port_or_contract_default() -> None:
    other = pod("10.0.0.1:9000")
    silent = pod("10.0.0.2:9000")
    silent["spec"] = {"containers": [{"name": "engine"}]}
    six = pod("10.0.0.3:8000")
    six["status"]["podIP"] = "fd00::3"
    found = build_catalog([service()], [other, silent, six]).services["team/chat"].endpoints
    assert {e.address for e in found} == {"10.0.0.1:9000", "10.0.0.2:8000", "[fd00::3]:8000"}


def test_routable_requires_envoy_health_and_client_role() -> None:
    pods = [pod("10.0.0.1:8000"), pod("10.0.0.2:8000"), pod("10.0.0.3:8000", ready=False)]
    pods.append(pod("10.0.0.4:8000", role="prefill"))
    every = {f"10.0.0.{n}:8000" for n in (1, 3, 4)}
    found = with_healthy(build_catalog([service()], pods), {"team/chat": every})
    assert [e.address for e in found.services["team/chat"].endpoints if e.routable] == ["10.0.0.1:8000"]
    assert found.by_name["chat"] is found.services["team/chat"]


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ([], DEFAULT_MAX_NUM_SEQS),
        (["--max-num-seqs", "16"], 16),
        (["--max-num-seqs=32", "--other"], 32),
        (["--max_num_seqs=48"], 48),
        (["--max-num-seqs=8", "--max-num-seqs", "64"], 64),
        (["--max-num-seqs", "--max-model-len=8"], DEFAULT_MAX_NUM_SEQS),
        (["--max-num-seqs"], DEFAULT_MAX_NUM_SEQS),
        (["--max-num-seqs", "many"], DEFAULT_MAX_NUM_SEQS),
    ],
)
def test_max_sequences_is_read_from_engine_args(args: list[str], expected: int) -> None:
    made = service()
    made["spec"]["engine"] = {"args": args}
    assert build_catalog([made], []).services["team/chat"].max_sequences == expected


@pytest.mark.parametrize(
    ("defaults", "args", "limit"),
    [
        ([], [], 2048),
        ([], ["--max-num-seqs", "16"], 128),
        (["--max-num-seqs=4"], [], 64),
        (["--max-num-seqs", "256"], ["--max_num_seqs", "16"], 128),
        (["--max-num-queued-reqs", "1k"], ["--max-num-seqs", "16"], 1000),
        ([], ["--max-num-seqs", "1k"], 8000),
        ([], ["--max-num-seqs", "\u00b2"], 2048),
    ],
)
def test_max_queued_of_a_pod_follows_its_launcher(defaults: list[str], args: list[str], limit: int) -> None:
    made = pod("10.0.0.1:8000")
    made["spec"]["containers"][0]["env"] = [
        {"name": "PLIMSOLL_DEFAULT_ARGS", "value": json.dumps(defaults)},
        {"name": "PLIMSOLL_ARGS", "value": json.dumps(args)},
    ]
    assert build_catalog([service()], [made]).services["team/chat"].max_queued == limit
    queue = command.queue_limit_arguments((*defaults, *args), load()) or ["", str(limit)]
    assert queue[1] == str(limit)


@pytest.mark.parametrize("value", [None, "", "{", "7", '{"a":1}'])
def test_max_queued_of_unreadable_arguments_is_the_default(value: str | None) -> None:
    made = pod("10.0.0.1:8000")
    made["spec"]["containers"][0]["env"] = [{"name": "PLIMSOLL_ARGS", "value": value}]
    assert build_catalog([service()], [made]).services["team/chat"].max_queued == 2048


def test_max_queued_is_that_of_the_largest_engine() -> None:
    small, large = pod("10.0.0.1:8000"), pod("10.0.0.2:8000")
    small["spec"]["containers"][0]["env"] = [{"name": "PLIMSOLL_ARGS", "value": '["--max-num-seqs","1"]'}]
    assert build_catalog([service()], [small]).services["team/chat"].max_queued == 64
    assert build_catalog([service()], [small, large]).services["team/chat"].max_queued == 2048
    assert build_catalog([service()], []).services["team/chat"].max_queued == MAX_REQUEST_SEQUENCES


def test_incremental_catalog_equals_full_one() -> None:
    """Random changes of services, pods, owners of names and deletions, in any order."""
    random, catalog = Random(7), CatalogOfPods()
    services: dict[str, Object] = {}
    pods: dict[str, Object] = {}
    for _ in range(400):
        name = f"s{random.randrange(6)}"
        changed_services: dict[str, Object | None] = {}
        changed_pods: dict[str, Object | None] = {}
        match random.randrange(5):
            case 0:
                changed_services[f"team/{name}"] = None
            case 1 | 2:
                deleted = {"deletionTimestamp": "2026-06-01T00:00:00Z"} if random.random() < 0.2 else {}
                age = f"2026-0{random.randrange(1, 9)}-01T00:00:00Z"
                model = random.choice(["shared", "other", None])
                changed_services[f"team/{name}"] = service(name, model=model, creationTimestamp=age, **deleted)
            case _:
                one = pod(f"10.0.0.{random.randrange(20)}:8000", service=name, ready=random.random() < 0.5)
                one["metadata"]["name"] = pod_name = f"p{random.randrange(12)}"
                changed_pods[f"team/{pod_name}"] = one if random.random() < 0.7 else None
        services = {k: v for k, v in (services | changed_services).items() if v is not None}
        pods = {k: v for k, v in (pods | changed_pods).items() if v is not None}
        assert catalog.set(services.values(), pods.values()) == build_catalog(services.values(), pods.values())


def test_incremental_catalog_keeps_unchanged_entries() -> None:
    catalog, routable = CatalogOfPods(), RoutableCatalog()
    known = {"team/one": frozenset({"10.0.0.1:8"}), "team/two": frozenset({"10.0.0.2:8"})}
    engines = [pod("10.0.0.1:8", service="one"), pod("10.0.0.2:8", service="two")]
    first = catalog.set([service("one"), service("two")], engines)
    marked = routable.update(first, known)
    second = catalog.builder.update({}, {"team/two-serve-8": None}, {})
    assert second.services["team/one"] is first.services["team/one"]
    assert second.services["team/two"].endpoints == ()
    assert routable.update(second, known).services["team/one"] is marked.services["team/one"]
    ejected = routable.update(second, known, frozenset({"10.0.0.1:8"}))
    assert [e.routable for e in ejected.services["team/one"].endpoints] == [False]
