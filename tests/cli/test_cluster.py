"""What is asked of a cluster, and the words when it does not answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from plimsoll.cli.cluster import Unanswered, connected, explanation, leader, service, services
from plimsoll.core.errors import ClusterError, Forbidden, NotFound, PlimsollError, Rejected, Unavailable
from tests import builders
from tests.cli import fake

CHAT, OTHER = builders.service("chat"), builders.service("summaries", namespace="team")
DOCUMENT = {"version": 1}


def cluster(**answers: Any) -> fake.FakeKube:
    """A cluster in which all is well. answers: what differs, by what is asked for."""
    usual = {
        "one": CHAT,
        "own": {"items": [CHAT, OTHER]},
        "all": {"items": [CHAT, OTHER, builders.service("draft", namespace="lab")]},
        "lease": {"spec": {"holderIdentity": "operator-1"}},
        "document": DOCUMENT,
    }
    paths = {
        "one": fake.services("team", "chat"),
        "own": fake.services("team"),
        "all": fake.SERVICES,
        "lease": fake.LEASE,
        "document": fake.explanation("operator-1", "team", "chat"),
    }
    return fake.FakeKube({paths[what]: answer for what, answer in (usual | answers).items()})


async def refusal(kube: fake.FakeKube, namespace: str = "team", name: str = "chat") -> str:
    """The words of an explanation that fails."""
    with pytest.raises(PlimsollError) as caught:
        await explanation(kube, namespace, name, "plimsoll-system")
    return str(caught.value)


async def test_explanation_is_read_from_leader() -> None:
    assert await explanation(cluster(), "team", "chat", "plimsoll-system") == DOCUMENT


@pytest.mark.parametrize(
    ("namespace", "name", "near"),
    [
        ("team", "chta", "there is chat"),
        ("team", "draft", "there is lab/draft"),
        ("team", "nothing-like-it", "there is chat, summaries"),
        ("void", "xyz", "there is none"),
    ],
)
async def test_service_unknown_name_suggests_similar_names(namespace: str, name: str, near: str) -> None:
    with pytest.raises(Unanswered) as caught:
        await service(cluster(), namespace, name)
    assert str(caught.value) == f"no InferenceService {name} in namespace {namespace}; {near}"


async def test_service_suggestions_need_list_permission() -> None:
    no = Forbidden("no", 403)
    with pytest.raises(Unanswered, match=r"there is chat$"):
        await service(cluster(all=no), "team", "chaty")
    with pytest.raises(Unanswered, match=r"may not be listed$"):
        await service(cluster(all=no, own=no), "team", "chaty")


@pytest.mark.parametrize("name", ["", "../../secrets", "Chat", "a b", "chat/x", "chat?x=1", "\x1b[2J"])
async def test_service_invalid_name_is_never_requested(name: str) -> None:
    with pytest.raises(Unanswered, match="is not the name of a service"):
        await service(fake.FakeKube({}), "team", name)


async def test_namespace_invalid_name_is_never_requested() -> None:
    for asked in (service(cluster(), "..", "chat"), services(cluster(), "a/b"), leader(cluster(), "")):
        with pytest.raises(Unanswered, match="is not the name of a namespace"):
            await asked


async def test_cluster_without_plimsoll_is_reported() -> None:
    empty = fake.FakeKube({})
    for asked in (service(empty, "team", "chat"), services(empty, None)):
        with pytest.raises(Unanswered, match="not installed"):
            await asked


async def test_missing_permission_is_named() -> None:
    no = Forbidden("User jane cannot", 403)
    assert "right to get pods/proxy in namespace plimsoll-system (User jane" in await refusal(cluster(document=no))
    assert "right to get leases.coordination.k8s.io in namespace plimsoll-system" in await refusal(cluster(lease=no))
    assert "right to get inferenceservices.plimsoll.dev in namespace team" in await refusal(cluster(one=no))
    with pytest.raises(Unanswered, match=r"list inferenceservices\.plimsoll\.dev in all namespaces"):
        await services(cluster(all=no), None)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (NotFound("no", 404), "no lease plimsoll-operator in namespace plimsoll-system: --operator-namespace"),
        ({"spec": {"holderIdentity": ""}}, "nobody holds"),
        ({"spec": {}}, "nobody holds"),
        ({}, "nobody holds"),
        ({"spec": {"holderIdentity": "../x"}}, "is not the name of a leader"),
    ],
)
async def test_leader_missing_or_invalid_lease_is_reported(answer: Any, words: str) -> None:
    with pytest.raises(Unanswered, match=words):
        await leader(cluster(lease=answer), "plimsoll-system")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (NotFound("404: Not Found", 404), "older than this program"),
        (NotFound('pods "operator-1" not found', 404), "another one leads within seconds"),
        (NotFound("the operator does not scale a service team/chat", 404), "plimsoll status says"),
        (Unavailable("error trying to reach service: dial tcp: i/o timeout", 503), "NetworkPolicy"),
        (Unavailable("this process does not lead", 503), "operator plimsoll-system/operator-1: this process"),
        (Rejected("pod has no address", 400), "operator-1: pod has no address"),
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
    with pytest.raises(Unanswered, match="kubeconfig cannot be used"):
        async with connected(str(path)):
            pass
