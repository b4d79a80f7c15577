"""What is asked of a cluster, and the words when it does not answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from plimsoll.cli.cluster import ClusterQueryError, connect, find_leader, get_explanation, get_service, list_services
from plimsoll.core.errors import BackendUnavailable, ClusterError, Forbidden, NotFound, ObjectRejected, PlimsollError
from tests import builders
from tests.cli import fake_kube

CHAT, OTHER = builders.service("chat"), builders.service("summaries", namespace="team")
DOCUMENT = {"version": 2}


def cluster(**answers: Any) -> fake_kube.FakeKube:
    """A cluster in which all is well. answers: what differs, by what is asked for."""
    usual = {
        "one": CHAT,
        "own": {"items": [CHAT, OTHER]},
        "all": {"items": [CHAT, OTHER, builders.service("draft", namespace="lab")]},
        "lease": {"spec": {"holderIdentity": "operator-1"}},
        "document": DOCUMENT,
    }
    paths = {
        "one": fake_kube.services("team", "chat"),
        "own": fake_kube.services("team"),
        "all": fake_kube.SERVICES,
        "lease": fake_kube.LEASE,
        "document": fake_kube.explanation("operator-1", "team", "chat"),
    }
    return fake_kube.FakeKube({paths[what]: answer for what, answer in (usual | answers).items()})


async def refusal(kube: fake_kube.FakeKube, namespace: str = "team", name: str = "chat") -> str:
    """The words of an explanation that fails."""
    with pytest.raises(PlimsollError) as caught:
        await get_explanation(kube, namespace, name, "plimsoll-system")
    return str(caught.value)


async def test_explanation_is_read_from_leader() -> None:
    assert await get_explanation(cluster(), "team", "chat", "plimsoll-system") == DOCUMENT


@pytest.mark.parametrize(
    ("namespace", "name", "near"),
    [
        ("team", "chta", "did you mean chat?"),
        ("team", "draft", "did you mean lab/draft?"),
        ("team", "nothing-like-it", "did you mean chat, summaries?"),
        ("void", "xyz", "the namespace has none"),
    ],
)
async def test_service_unknown_name_suggests_similar_names(namespace: str, name: str, near: str) -> None:
    with pytest.raises(ClusterQueryError) as caught:
        await get_service(cluster(), namespace, name)
    assert str(caught.value) == f"no InferenceService {name} in namespace {namespace}; {near}"


async def test_service_suggestions_need_list_permission() -> None:
    no = Forbidden("no", 403)
    with pytest.raises(ClusterQueryError, match=r"did you mean chat\?$"):
        await get_service(cluster(all=no), "team", "chaty")
    with pytest.raises(ClusterQueryError, match=r"no permission to list similar names$"):
        await get_service(cluster(all=no, own=no), "team", "chaty")


@pytest.mark.parametrize("name", ["", "../../secrets", "Chat", "a b", "chat/x", "chat?x=1", "\x1b[2J"])
async def test_service_invalid_name_is_never_requested(name: str) -> None:
    with pytest.raises(ClusterQueryError, match="is not a valid service name"):
        await get_service(fake_kube.FakeKube({}), "team", name)


async def test_namespace_invalid_name_is_never_requested() -> None:
    for requested in (
        get_service(cluster(), "..", "chat"),
        list_services(cluster(), "a/b"),
        find_leader(cluster(), ""),
    ):
        with pytest.raises(ClusterQueryError, match="is not a valid namespace name"):
            await requested


async def test_cluster_without_plimsoll_is_reported() -> None:
    empty = fake_kube.FakeKube({})
    for requested in (get_service(empty, "team", "chat"), list_services(empty, None)):
        with pytest.raises(ClusterQueryError, match="not installed"):
            await requested


async def test_missing_permission_is_named() -> None:
    no = Forbidden("User jane cannot", 403)
    assert "permission to get pods/proxy in namespace plimsoll-system (User jane" in await refusal(cluster(document=no))
    assert "permission to get leases.coordination.k8s.io in namespace plimsoll-system" in await refusal(
        cluster(lease=no)
    )
    assert "permission to get inferenceservices.plimsoll.dev in namespace team" in await refusal(cluster(one=no))
    with pytest.raises(ClusterQueryError, match=r"list inferenceservices\.plimsoll\.dev in all namespaces"):
        await list_services(cluster(all=no), None)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (NotFound("no", 404), "no lease plimsoll-operator in namespace plimsoll-system: set --operator-namespace"),
        ({"spec": {"holderIdentity": ""}}, "has no holder"),
        ({"spec": {}}, "has no holder"),
        ({}, "has no holder"),
        ({"spec": {"holderIdentity": "../x"}}, "is not a valid leader name"),
    ],
)
async def test_leader_missing_or_invalid_lease_is_reported(answer: Any, words: str) -> None:
    with pytest.raises(ClusterQueryError, match=words):
        await find_leader(cluster(lease=answer), "plimsoll-system")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (NotFound("404: Not Found", 404), "older than this program"),
        (NotFound('pods "operator-1" not found', 404), "try again in a few seconds"),
        (NotFound("the operator does not scale a service team/chat", 404), "run plimsoll status"),
        (BackendUnavailable("error trying to reach service: dial tcp: i/o timeout", 503), "NetworkPolicy"),
        (BackendUnavailable("error trying to reach service: connection refused", 503), "does not run at the moment"),
        (BackendUnavailable("this process does not lead", 503), "operator plimsoll-system/operator-1: this process"),
        (ObjectRejected("pod has no address", 400), "operator-1: pod has no address"),
        (ClusterError("teapot", 418), "operator-1: teapot"),
    ],
)
async def test_leader_unreachable_suggests_next_step(error: ClusterError, words: str) -> None:
    assert words in await refusal(cluster(document=error))


async def test_missing_service_is_reported_before_missing_leader() -> None:
    gone = NotFound("no", 404)
    assert "no InferenceService" in await refusal(cluster(one=gone, lease=gone))


async def test_connected_unusable_kubeconfig_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "config"
    path.write_text("apiVersion: v1\nkind: Config\ncurrent-context: absent\n")
    with pytest.raises(ClusterQueryError, match="cannot use the kubeconfig"):
        async with connect(str(path)):
            pass
