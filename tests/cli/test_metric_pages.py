"""Engines that only their metrics page shows: which pods are read, and what is proposed."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from plimsoll.api.v1alpha1 import parse
from plimsoll.cli.adopt import AdoptCommandError, documents
from plimsoll.cli.metric_pages import MAX_PODS, MAX_PORTS, TIMEOUT_S, engine_of_page
from plimsoll.core.errors import BackendUnavailable, ClusterError, Forbidden
from tests.cli.fake_kube import FakeKube
from tests.cli.test_adopt import GROUPS, PODS, VLLM, owner, pod, workload

Object = dict[str, Any]

VLLM_PAGE = b'# HELP vllm:x\n# TYPE vllm:x gauge\nvllm:num_requests_running{model_name="m"} 1.0\n'
GPU = {"limits": {"nvidia.com/gpu": "4"}}


class Pods(FakeKube):
    """Pods of one namespace, whose ports have these pages. requests: pod and port of each."""

    def __init__(self, pods: list[Object], pages: dict[tuple[str, int], bytes | Exception], *objects: Object) -> None:
        answers: Object = {PODS: {"items": pods}, **GROUPS}
        for one in objects:
            answers |= one
        super().__init__(answers)
        self.pages, self.requests = pages, list[tuple[str, int]]()

    async def request_pod(self, namespace: str, pod: str, port: int, path: str, *_: Any, **limits: Any) -> bytes:
        assert (namespace, path, limits) == ("team", "metrics", {"timeout": TIMEOUT_S, "max_bytes": 1 << 20})
        self.requests.append((pod, port))
        found = self.pages.get((pod, port), BackendUnavailable("connection refused"))
        if isinstance(found, Exception):
            raise found
        return found

    async def adopt(self) -> list[str]:
        return await documents(self, "team", reads_pages=True)


def running(name: str, owned_by: Object | None, *ports: int, **container: Any) -> Object:
    declared = [{"containerPort": port} for port in ports]
    return pod(name, owned_by, image="registry/own:1", ports=declared, **container) | {"status": {"phase": "Running"}}


async def test_metrics_page_makes_a_manifest_with_its_port() -> None:
    fleet = [running(f"own-{n}", owner("StatefulSet", "own"), 8080, 9100, resources=GPU) for n in range(2)]
    kube = Pods(fleet, {("own-0", 9100): VLLM_PAGE}, workload("statefulsets", "own"))
    [text] = await kube.adopt()
    target = parse(yaml.safe_load(text)).spec.sized_tiers["serve"]
    assert (target.metrics_port, target.gpus) == (9100, 4)
    assert "# StatefulSet team/own: port 9100 has a metrics page of vLLM, 2 pods\n" in text
    assert "metricsPort: 9100 of its metrics page" in text
    assert "engine: not known" not in text
    assert kube.requests == [("own-0", 8080), ("own-0", 9100)], "one pod of each owner"


async def test_pages_are_read_only_where_the_user_asks() -> None:
    kube = Pods([running("own-0", owner("StatefulSet", "own"), 9100)], {("own-0", 9100): VLLM_PAGE})
    [text] = await documents(kube, "team")
    assert text.startswith("# no engine was found")
    assert kube.requests == []


async def test_only_other_running_pods_with_ports_are_asked() -> None:
    pods = [
        pod("vllm", owner("Deployment", "a"), ports=[{"containerPort": 8000}], **VLLM)
        | {"status": {"phase": "Running"}},
        running("portless", owner("Deployment", "b")),
        running("pending", owner("Deployment", "c"), 8000) | {"status": {"phase": "Pending"}},
        running("udp", owner("Deployment", "d")),
    ]
    pods[3]["spec"]["containers"][0]["ports"] = [{"containerPort": 53, "protocol": "UDP"}]
    own = running("own", owner("Deployment", "e"), 8000)
    own["metadata"]["labels"] = {"plimsoll.dev/role": "serve"}
    kube = Pods([*pods, own], {})
    await kube.adopt()
    assert kube.requests == []


async def test_requests_are_bounded_and_pods_with_gpus_come_first() -> None:
    pods = [running(f"p{n:02}", owner("StatefulSet", f"s{n:02}"), *range(8000, 8009)) for n in range(MAX_PODS + 5)]
    pods[-1]["spec"]["containers"][0]["resources"] = GPU
    kube = Pods(pods, {})
    made = await kube.adopt()
    assert len({name for name, _ in kube.requests}) == MAX_PODS
    assert len(kube.requests) == MAX_PODS * MAX_PORTS
    assert pods[-1]["metadata"]["name"] in {name for name, _ in kube.requests[: 4 * MAX_PORTS]}
    assert made == ["# metrics pages of 5 more workloads were not read: use -n\n"]


@pytest.mark.parametrize(
    "answer", [BackendUnavailable("answered more than 1048576 bytes"), ClusterError("busy", 500), b"go_gc 1\n",
               Forbidden("the program says no", 403)],
)  # fmt: skip
async def test_ports_without_an_engine_are_no_evidence(answer: bytes | Exception) -> None:
    kube = Pods([running("web", owner("Deployment", "web"), 80)], {("web", 80): answer})
    [text] = await kube.adopt()
    assert text.startswith("# no engine was found")


async def test_page_of_another_engine_is_named() -> None:
    kube = Pods(
        [running("own-0", owner("StatefulSet", "own"), 30000)],
        {("own-0", 30000): b"sglang:num_running_reqs 0\n"},
        workload("statefulsets", "own"),
    )
    [text] = await kube.adopt()
    assert yaml.safe_load(text) is None
    assert "not adopted: the engine SGLang is not supported as a target yet" in text


async def test_missing_right_to_the_proxy_is_an_error() -> None:
    refused = Forbidden('pods "own-0" is forbidden: User "jane" cannot get resource "pods/proxy"', 403)
    kube = Pods([running("own-0", owner("StatefulSet", "own"), 9100)], {("own-0", 9100): refused})
    with pytest.raises(AdoptCommandError, match="--metrics-pages needs permission to get pods/proxy in namespace team"):
        await kube.adopt()


@pytest.mark.parametrize(
    ("page", "title"),
    [(VLLM_PAGE, "vLLM"), (b"llamacpp:requests_processing 1\n", "llama.cpp"), (b"# HELP vllm:x\n", None), (b"", None)],
)
def test_engine_of_a_page(page: bytes, title: str | None) -> None:
    found = engine_of_page(page)
    assert (None if found is None else found.title) == title
