"""Failed watches and writes are counted, with the reason."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from kubernetes.aio import client

from plimsoll.adapters.kube_client import MAX_PAGE_BYTES, PODS, KubeClient
from plimsoll.core.errors import BackendUnavailable, ClusterError
from plimsoll.telemetry.operator_metrics import OPERATOR
from tests.ports import free_port


class RefusingApi:
    """A server that answers each request with one status."""

    def __init__(self) -> None:
        self.status, self.request_started = 403, asyncio.Event()
        self.body, self.headers = b'{"message": "no"}', dict[str, str]()

    async def answer(self, _: web.Request) -> web.Response:
        self.request_started.set()
        return web.Response(body=self.body, status=self.status, headers=self.headers)


@pytest.fixture
async def refusing() -> AsyncIterator[tuple[RefusingApi, KubeClient]]:
    api, app, port = RefusingApi(), web.Application(), free_port()
    app.router.add_route("*", "/{path:.*}", api.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    kube = KubeClient(client.ApiClient(client.Configuration(host=f"http://127.0.0.1:{port}")))
    yield api, kube
    await kube.close()
    await runner.cleanup()


def counted(name: str, **labels: str) -> float:
    return OPERATOR.get_sample_value(f"plimsoll_operator_{name}_total", labels) or 0.0


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (403, "forbidden"),
        (404, "not_found"),
        (409, "conflict"),
        (422, "rejected"),
        (429, "unavailable"),
        (500, "unavailable"),
        (418, "other"),
    ],
)
async def test_failed_write_is_counted(refusing: tuple[RefusingApi, KubeClient], status: int, reason: str) -> None:
    api, kube = refusing
    api.status = status
    before = counted("write_failures", verb="POST", reason=reason)
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a", "namespace": "team"}}
    with pytest.raises(ClusterError):
        await kube.create(pod)
    with pytest.raises(ClusterError):
        await kube.get(PODS, "team", "a")
    assert counted("write_failures", verb="POST", reason=reason) == before + 1


async def test_failed_list_of_a_watch_is_counted(refusing: tuple[RefusingApi, KubeClient]) -> None:
    api, kube = refusing
    before = counted("watch_failures", resource="pods")
    following = asyncio.create_task(anext(kube.watch(PODS, "team")))  # type: ignore[arg-type]
    async with asyncio.timeout(30):
        await api.request_started.wait()
        while counted("watch_failures", resource="pods") == before:
            await asyncio.sleep(0.01)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"message": 5}', '{"message": 5}'),
        (b'{"message": null}', '{"message": null}'),
        (b"[" * 100_000, "[" * 500),
        (b"busy", "busy"),
        (b"a" * (MAX_PAGE_BYTES + 1), ""),
    ],
    ids=["number", "null", "deep", "text", "too long"],
)
async def test_any_body_of_a_failure_is_an_error(
    refusing: tuple[RefusingApi, KubeClient], body: bytes, message: str
) -> None:
    """A pod may have answered, through the API server."""
    api, kube = refusing
    api.status, api.body, api.headers = 503, body, {"Retry-After": "\u00b2"}
    with pytest.raises(BackendUnavailable) as caught:
        await kube.request_pod("team", "engine", 8000, "metrics")
    assert (str(caught.value), caught.value.status, caught.value.retry_after_seconds) == (message, 503, None)
