"""An object of the API server takes bounded memory, however large and of whatever form it is."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.adapters import kube_client
from plimsoll.adapters.kube_client import INFERENCESERVICES, PODS, KubeClient
from plimsoll.adapters.normalize import value_at
from plimsoll.adapters.object_size import MAX_SERVICE_BYTES, MAX_VALUES, bounded, measure
from plimsoll.api.v1alpha1 import parse
from plimsoll.controllers.object_cache import ObjectCache
from plimsoll.controllers.reconcile.service_status import StatusInputs, build_conditions
from plimsoll.controllers.webhook.validation import validate_change
from plimsoll.core.errors import InvalidSpec
from tests import builders

Object = dict[str, Any]
TEXTS = st.text(st.characters(exclude_categories=("Cc", "Cs"), exclude_characters='"\\'), max_size=30)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXTS, inner, max_size=5),
)


def service_with(affinity: Object, name: str = "chat") -> Object:
    tier = {"minReplicas": 1, "pod": {"affinity": affinity}}
    return builders.service(name, tiers={"serve": tier}, model={"uri": "hf://a/b", "name": "shown"})


@given(JSON)
def test_measure_is_close_to_the_size_of_the_json(value: Any) -> None:
    exact = len(json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode())
    assert exact - 2 <= measure(value)[0] <= 3 * exact + 8


@pytest.mark.parametrize(
    ("affinity", "size", "part"),
    [
        ({"k": "x" * 1_200_000}, "1172 KiB", "most of it is spec.tiers.serve.pod.affinity.k;"),
        ({"k": [[]] * (MAX_VALUES + 1)}, "and 164", "most of it is spec.tiers.serve.pod.affinity.k;"),
        ({f"key-{one}": one for one in range(10_000)}, "and 100", "most of it is spec.tiers.serve.pod.affinity;"),
    ],
)
def test_bounded_large_service_keeps_identity_and_says_why(affinity: Object, size: str, part: str) -> None:
    raw = service_with(affinity)
    raw["metadata"]["annotations"] = {"a": "b"}
    raw["status"] = {"modelNames": ["shown"], "conditions": [{"type": "Ready", "status": "True"}]}
    kept = bounded(raw)
    assert measure(kept)[0] < 2_000
    identity = ("name", "namespace", "uid")
    assert [kept["metadata"][name] for name in identity] == [raw["metadata"][name] for name in identity]
    assert value_at(kept, "spec", "model", "name") == "shown"
    assert kept["status"] == raw["status"]
    with pytest.raises(InvalidSpec) as caught:
        parse(kept)
    assert size in str(caught.value)
    assert part in str(caught.value)
    assert f"the limit is {MAX_SERVICE_BYTES // 1024} KiB and {MAX_VALUES} values" in str(caught.value)


def test_bounded_other_service_is_whole_without_managed_fields() -> None:
    raw = service_with({"k": "x" * 100_000})
    assert bounded({**raw, "metadata": raw["metadata"] | {"managedFields": [{"x": "y" * 1_000_000}]}}) == raw


def test_bounded_large_deployment_keeps_its_replicas_and_status() -> None:
    raw = builders.deployment(builders.service("chat"), "decode", replicas=3, ready=2)
    raw["spec"]["template"] = {"metadata": {"annotations": {"a": "x" * 1_000_000}}}
    kept = bounded(raw)
    assert kept["spec"] == {"replicas": 3}
    assert (kept["status"], kept["metadata"]["labels"]) == (raw["status"], raw["metadata"]["labels"])


def test_conditions_of_large_service_are_invalid_spec() -> None:
    cache, raw = ObjectCache(), bounded(service_with({"k": "x" * 1_200_000}))
    cache.put(raw)
    problem = cache.parsed(raw)
    assert isinstance(problem, InvalidSpec)
    found = build_conditions(StatusInputs(raw, spec_problems=problem.problems))
    assert [(one.type, one.reason) for one in found] == [("Ready", "InvalidSpec"), ("Stalled", "InvalidSpec")]
    assert "1172 KiB" in found[1].event_message


def test_webhook_refuses_large_service() -> None:
    small, large = service_with({}), bounded(service_with({"k": "x" * 1_200_000}))
    assert "1172 KiB" in validate_change(large, None, None).errors[0]
    assert "1172 KiB" in validate_change(large, small, None).errors[0]


class PagedKube(KubeClient):
    """An API server with these services. sizes: bytes of each answer, as far as they were read."""

    def __init__(self, *services: Object) -> None:
        self.services = services
        self.limits: list[int] = []
        self.read: list[int] = []

    async def _send(self, method: str, path: str, query: dict[str, str] | None = None, *_: Any, **__: Any) -> Any:
        assert query is not None
        limit, start = int(query["limit"]), int(query.get("continue", "0"))
        more = {"continue": str(start + limit)} if start + limit < len(self.services) else {}
        meta = {"resourceVersion": "7", **more}
        body = json.dumps({"items": self.services[start : start + limit], "metadata": meta}).encode()
        self.limits.append(limit)
        self.read.append(0)

        async def iter_any() -> Any:
            for at in range(0, len(body), 65536):
                self.read[-1] += len(body[at : at + 65536])
                yield body[at : at + 65536]

        return SimpleNamespace(response=SimpleNamespace(content=SimpleNamespace(iter_any=iter_any), close=lambda: None))


async def test_list_of_large_services_reads_small_pages() -> None:
    large = [service_with({"k": "x" * 1_200_000}, f"large-{number:02}") for number in range(60)]
    kube = PagedKube(*large, builders.service("small"))
    items, version = await kube.list(INFERENCESERVICES)
    assert ([one["metadata"]["name"] for one in items][::60], len(items), version) == (["large-00", "small"], 61, "7")
    assert max(kube.read) <= kube_client.MAX_PAGE_BYTES + 65536
    assert sum(measure(one)[0] for one in items) < 60 * 2_000
    assert items[-1]["spec"] == builders.service("small")["spec"]


async def test_list_of_small_services_reads_large_pages() -> None:
    kube = PagedKube(*(builders.service(f"small-{number}") for number in range(kube_client.PAGE_SIZE + 1)))
    assert len((await kube.list(INFERENCESERVICES))[0]) == kube_client.PAGE_SIZE + 1
    assert kube.limits == [kube_client.PAGE_SIZE] * 2


async def test_list_of_one_page_lets_others_run() -> None:
    kube, turns = PagedKube(*(builders.service(f"small-{number}") for number in range(kube_client.PAGE_SIZE))), 0

    async def take_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    other = asyncio.create_task(take_turns())
    await kube.list(INFERENCESERVICES)
    other.cancel()
    assert turns >= kube_client.PAGE_SIZE // kube_client.SLICE_SIZE


async def test_list_reads_one_object_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kube_client, "MAX_PAGE_BYTES", 1000)
    kube = PagedKube(service_with({"k": "x" * 10_000}))
    assert [one["metadata"]["name"] for one in (await kube.list(INFERENCESERVICES))[0]] == ["chat"]


async def test_only_lists_of_watches_share_equal_parts() -> None:
    listed = [builders.pod(builders.service(), tier, f"{tier}-{n}") for n in (1, 2) for tier in ("decode", "prefill")]
    kube = PagedKube(*listed)
    alone, _ = await kube.list(PODS)
    shared, _ = await kube.list(PODS, share=True)
    assert shared == alone
    names = [one["metadata"]["labels"] for one in alone]
    assert names[0] == names[2]
    assert names[0] is not names[2]
    assert shared[0]["metadata"]["labels"] is shared[2]["metadata"]["labels"]
    assert shared[1]["metadata"]["labels"] is shared[3]["metadata"]["labels"]
