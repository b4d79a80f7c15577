"""A gateway of many namespaces: each watch holds a connection, and none waits for another one to end."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from aiohttp import web

from plimsoll.adapters.kube_client import PODS, KubeClient
from tests.ports import free_port

WATCHES = 110  # three in each namespace of watchNamespaces


async def test_all_watches_of_a_gateway_are_open_at_once(tmp_path: Path) -> None:
    open_watches, all_open = 0, asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal open_watches
        if "watch" not in request.query:
            return web.json_response({"items": [], "metadata": {"resourceVersion": "1"}})
        stream = web.StreamResponse()
        await stream.prepare(request)
        open_watches += 1
        if open_watches == WATCHES:
            all_open.set()
        await asyncio.Event().wait()
        return stream

    async def follow(kube: KubeClient, selector: str) -> None:
        async for _ in kube.watch(PODS, "team", selector):
            pass

    app, port = web.Application(), free_port()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    cluster = {"name": "c", "cluster": {"server": f"http://127.0.0.1:{port}"}}
    context = {"name": "c", "context": {"cluster": "c", "user": "u"}}
    named = {"clusters": [cluster], "contexts": [context], "users": [{"name": "u", "user": {}}]}
    config = {"apiVersion": "v1", "kind": "Config", "current-context": "c", **named}
    (tmp_path / "config").write_text(json.dumps(config))
    kube = await KubeClient.connect(str(tmp_path / "config"))
    tasks = [asyncio.create_task(follow(kube, f"app=llm-{number}")) for number in range(WATCHES)]
    try:
        async with asyncio.timeout(20):
            await all_open.wait()
        assert open_watches == WATCHES
    finally:
        for task in tasks:
            task.cancel()
        await kube.close()
        await runner.cleanup()
