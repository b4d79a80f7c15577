"""The launcher's adapters against an engine on loopback: what is desired is loaded, whatever happens in between."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher import client, desired_adapters
from launcher.adapter_source import SourceError, adapter_directory, resolve_source
from launcher.adapter_state import AdapterStates, State
from launcher.adapters import AdapterLoader, source_resolver
from launcher.desired_adapters import Adapter
from tests.engine_image.middleware_harness import CONTRACT

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
BAD = "/bad"


class LoraEngine:
    """An engine on loopback that knows the two paths; `loaded` are its adapters with their paths."""

    def __init__(self) -> None:
        self.loaded: dict[str, str] = {}
        self.calls: list[tuple[str, str]] = []
        self.bad = {BAD}
        self.hold = asyncio.Event()
        self.hold.set()
        self.port = 0

    async def handle(self, request: web.Request) -> web.Response:
        body = await request.json()
        name = body["lora_name"]
        self.calls.append((request.path, name))
        if request.path == UNLOAD:
            self.loaded.pop(name)
            return web.Response(text="Success")
        await self.hold.wait()
        if body["lora_path"] in self.bad:
            error = {"message": f"No adapter found for {body['lora_path']}", "type": "NotFoundError", "code": 404}
            return web.json_response({"error": error}, status=404)
        if name in self.loaded:
            return web.json_response({"error": {"message": "has already been loaded", "code": 400}}, status=400)
        self.loaded[name] = body["lora_path"]
        return web.Response(text="Success")

    async def send(self, path: str, body: bytes, seconds: float) -> client.Response:
        return await client.request(self.port, path, body, seconds)


@asynccontextmanager
async def lora_engine() -> AsyncIterator[LoraEngine]:
    engine = LoraEngine()
    app = web.Application()
    app.router.add_post("/{path:.*}", engine.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    engine.port = runner.addresses[0][1]
    yield engine
    await runner.cleanup()


class Bench:
    """A loader with a clock that the test moves, and the file that the kubelet writes."""

    def __init__(self, folder: Path, engine: LoraEngine) -> None:
        self.now, self.folder, self.engine = 0.0, folder, engine
        self.states = AdapterStates(folder)

        async def resolve(adapter: Adapter) -> str:
            if adapter.location == "/gone":
                raise SourceError("/gone does not exist in the engine pod")
            if adapter.location == "/unreadable":
                raise PermissionError("/unreadable")
            return adapter.location

        (folder / "desired").mkdir(exist_ok=True)
        self.loader = AdapterLoader(folder / "desired", self.states, engine.send, resolve, lambda: self.now)

    def desire(self, *adapters: tuple[str, str] | tuple[str, str, bool]) -> None:
        entries = [
            {"name": name, "scheme": "file", "location": path, "revision": "", "pinned": bool(pinned)}
            for name, path, *pinned in adapters
        ]
        (self.folder / "desired" / "adapters.json").write_text(json.dumps({"adapters": entries}))

    async def settle(self) -> None:
        """Steps until nothing is under way."""
        await self.loader.step()
        while self.loader._loads:
            await asyncio.wait(set(self.loader._loads.values()))
            await asyncio.sleep(0)
        await self.loader.step()

    def state(self, name: str) -> State | None:
        found = AdapterStates(self.folder).get(name)
        return None if found is None else found.state

    def loaded(self) -> dict[str, str]:
        """The engine's adapters, by the name without the hash of the source."""
        return {name.partition("@")[0]: path for name, path in self.engine.loaded.items()}


@asynccontextmanager
async def bench(folder: Path) -> AsyncIterator[Bench]:
    async with lora_engine() as engine:
        yield Bench(folder, engine)


async def test_pinned_adapters_are_loaded_before_ready(tmp_path: Path) -> None:
    async with bench(tmp_path) as one:
        one.desire(("sql", "/sql", True), ("law", "/law"), ("bad", BAD, True))
        await one.loader.load_pinned()
        assert one.loaded() == {"sql": "/sql"}
        assert [one.state(name) for name in ("sql", "law", "bad")] == [State.LOADED, State.LOADING, State.FAILED]
        await one.settle()
        assert one.loaded() == {"sql": "/sql", "law": "/law"}


async def test_adapters_come_and_go_with_the_file(tmp_path: Path) -> None:
    async with bench(tmp_path) as one:
        await one.settle()
        assert one.loader.document == []
        one.desire(("sql", "/sql"), ("law", "/law"))
        await one.settle()
        one.desire(("law", "/law"), ("tax", "/tax"))
        await one.settle()
        await one.settle()
        assert one.loaded() == {"law": "/law", "tax": "/tax"}
        assert one.state("sql") is None


async def test_new_source_is_loaded_before_the_old_one_goes(tmp_path: Path) -> None:
    async with bench(tmp_path) as one:
        one.desire(("sql", "/v1"))
        await one.settle()
        one.desire(("sql", "/v2"))
        await one.settle()
        assert one.loaded() == {"sql": "/v2"}
        assert [path for path, _ in one.engine.calls] == [LOAD, LOAD, UNLOAD]


async def test_failed_new_source_keeps_the_old_one_and_says_why(tmp_path: Path) -> None:
    async with bench(tmp_path) as one:
        one.desire(("sql", "/v1"))
        await one.settle()
        one.desire(("sql", BAD))
        await one.settle()
        assert one.loaded() == {"sql": "/v1"}
        assert one.state("sql") is State.LOADED
        assert one.loader.document == [{"name": "sql", "loaded": True, "error": "No adapter found for /bad"}]


async def test_failure_is_that_adapters_alone_and_is_retried(tmp_path: Path) -> None:
    async with bench(tmp_path) as one:
        one.desire(("bad", BAD), ("gone", "/gone"), ("sql", "/sql"))
        await one.settle()
        errors = {entry["name"]: entry["error"] for entry in one.loader.document}
        assert errors == {
            "bad": "No adapter found for /bad",
            "gone": "/gone does not exist in the engine pod",
            "sql": None,
        }
        calls = len(one.engine.calls)
        await one.settle()
        assert len(one.engine.calls) == calls  # not before its time
        one.engine.bad.clear()
        one.now = 10.0
        await one.settle()
        assert one.loaded() == {"sql": "/sql", "bad": BAD}
        assert one.state("bad") is State.LOADED


async def test_adapter_removed_during_its_load_is_unloaded(tmp_path: Path) -> None:
    async with bench(tmp_path) as one:
        one.engine.hold.clear()
        one.desire(("sql", "/sql"))
        await one.loader.step()
        while not one.engine.calls:
            await asyncio.sleep(0.01)
        one.desire()
        await one.loader.step()
        one.engine.hold.set()
        await one.settle()
        await one.settle()
        assert one.loaded() == {}
        assert one.state("sql") is None


async def test_source_reverted_during_a_load_stays_loaded(tmp_path: Path) -> None:
    async with bench(tmp_path) as one:
        one.desire(("sql", "/v1"))
        await one.settle()
        one.engine.hold.clear()
        one.desire(("sql", "/v2"))
        await one.loader.step()
        while len(one.engine.calls) < 2:
            await asyncio.sleep(0.01)
        one.desire(("sql", "/v1"))
        one.engine.hold.set()
        for _ in range(3):
            await one.settle()
        assert one.loaded() == {"sql": "/v1"}
        assert one.state("sql") is State.LOADED
        assert one.engine.loaded.keys() == {entry.loaded for entry in one.loader._entries.values()}


async def test_unexpected_error_of_a_source_is_that_adapters_alone(tmp_path: Path) -> None:
    async with bench(tmp_path) as one:
        one.desire(("sql", "/sql"), ("bad", "/unreadable"))
        await one.settle()
        assert one.loaded() == {"sql": "/sql"}
        errors = {entry["name"]: entry["error"] for entry in one.loader.document}
        assert errors == {"sql": None, "bad": "PermissionError: /unreadable"}
        assert one.state("bad") is State.FAILED


async def test_loop_goes_on_after_an_unexpected_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with bench(tmp_path) as one:
        real, failures = one.loader.step, [RuntimeError("once")]

        async def step() -> None:
            if failures:
                raise failures.pop()
            await real()

        monkeypatch.setattr("launcher.adapters.POLL_SECONDS", 0.01)
        monkeypatch.setattr(one.loader, "step", step)
        one.desire(("sql", "/sql"))
        following = asyncio.create_task(one.loader.follow())
        while not one.loaded() and not following.done():
            await asyncio.sleep(0.01)
        following.cancel()
        assert one.loaded() == {"sql": "/sql"}


async def test_state_that_cannot_be_written_stops_no_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(states: dict[str, tuple[State, str, str]]) -> None:
        raise OSError("no space left on device")

    async with bench(tmp_path) as one:
        with monkeypatch.context() as full:
            full.setattr(one.states, "write", write)
            one.desire(("sql", "/sql", True))
            await one.loader.load_pinned()
        await one.settle()
        assert one.loaded() == {"sql": "/sql"}
        assert one.state("sql") is State.LOADED


async def test_unreadable_file_changes_nothing(tmp_path: Path) -> None:
    async with bench(tmp_path) as one:
        one.desire(("sql", "/sql"))
        await one.settle()
        for text in ("", "{", "[" * 100_000, "[]", '{"adapters": [{"name": 1}]}', '{"adapters": {}}'):
            (tmp_path / "desired" / "adapters.json").write_text(text)
            await one.settle()
        assert one.loaded() == {"sql": "/sql"}


async def test_silent_engine_is_a_failure_in_words(tmp_path: Path) -> None:
    async with bench(tmp_path) as one:
        one.engine.port = 1
        one.desire(("sql", "/sql"))
        await one.settle()
        assert "the engine does not answer" in one.loader.document[0]["error"]


ADAPTER_SETS = st.lists(
    st.dictionaries(st.sampled_from("abcd"), st.sampled_from(["/v1", "/v2", BAD]), max_size=4), min_size=1, max_size=5
)


@settings(max_examples=20, deadline=None)
@given(ADAPTER_SETS)
def test_engine_ends_with_the_last_desired_set(
    tmp_path_factory: pytest.TempPathFactory, sets: list[dict[str, str]]
) -> None:
    async def run() -> None:
        async with bench(tmp_path_factory.mktemp("loader")) as one:
            for desired in sets:
                one.desire(*desired.items())
                await one.settle()
                await one.settle()
            loadable = {name: path for name, path in sets[-1].items() if path != BAD}
            assert {name: path for name, path in one.loaded().items() if sets[-1].get(name) != BAD} == loadable
            for name, path in sets[-1].items():
                assert one.state(name) is State.LOADED or path == BAD
            assert one.loaded().keys() <= sets[-1].keys()

    asyncio.run(run())


def test_desired_names_differ_by_source() -> None:
    entry = {"name": "a/b", "scheme": "hf", "location": "x/y", "revision": "", "pinned": True}
    found = [
        desired_adapters.parse(json.dumps({"adapters": [{**entry, **change}]}).encode())["a/b"].engine_name
        for change in ({}, {"revision": "v2"}, {"location": "x/z"}, {"scheme": "file"})
    ]
    assert len(set(found)) == 4
    assert all(name.startswith("a/b@") for name in found)


def adapter_at(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "adapter_config.json").write_text("{}")
    return path


def test_source_stays_in_its_claim(tmp_path: Path) -> None:
    root = tmp_path / "claims" / "one"
    good, outside = adapter_at(root / "good"), adapter_at(tmp_path / "outside")
    (root / "link").symlink_to(outside)
    (root / "inner").symlink_to(good)
    (adapter_at(root / "leaky") / "weights").symlink_to("/etc/passwd")
    assert adapter_directory(root / "good", root) == good
    assert adapter_directory(root / "inner", root) == good
    for name, words in (
        ("link", "leads out of its claim"),
        ("../../outside", "leads out of its claim"),
        ("leaky", "has a link that leads out"),
        ("absent", "does not exist in the engine pod"),
    ):
        with pytest.raises(SourceError, match=words):
            adapter_directory(root / name, root)


async def test_source_that_is_no_adapter_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(SourceError, match=r"has no adapter_config.json"):
        await resolve_source("file", str(tmp_path / "empty"), "", tmp_path, {})
    with pytest.raises(SourceError, match="is not a place for adapters"):
        await resolve_source("file", "/proc/self", "", tmp_path, {})
    with pytest.raises(SourceError, match="cannot read s3"):
        await resolve_source("s3", "bucket/a", "", tmp_path, {})


@pytest.mark.parametrize(
    ("config", "allowed"),
    [
        ({"r": 16}, True),
        ({"r": 17}, False),
        ({"r": "17"}, True),
        ({}, True),
        ([17], True),
        ("no JSON", True),
    ],
)
async def test_adapter_of_a_higher_rank_is_not_loaded(tmp_path: Path, config: Any, allowed: bool) -> None:
    """The engine's own words would name no field of the service. What has no rank is for the engine to refuse."""
    made = adapter_at(tmp_path / "sql")
    (made / "adapter_config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    resolve = source_resolver(CONTRACT, "vllm", 16, {})
    adapter = Adapter("sql", "file", str(made), "", False)
    if allowed:
        assert await resolve(adapter) == str(made)
        return
    with pytest.raises(SourceError, match=r"is 17, above the 16 of spec.engine.lora.maxLoraRank: raise that field"):
        await resolve(adapter)


async def test_claim_of_an_adapter_is_below_the_mounts(tmp_path: Path) -> None:
    made = adapter_at(tmp_path / "weights" / "sql" / "v1")
    assert await resolve_source("pvc", "weights/sql/v1", "", tmp_path, {}) == str(made)


async def test_failed_download_has_the_last_words_of_the_library(tmp_path: Path) -> None:
    (tmp_path / "huggingface_hub.py").write_text(
        "def snapshot_download(name, revision):\n    raise RuntimeError(f'no {name} at {revision}')\n"
    )
    with pytest.raises(SourceError, match=r"acme/sql cannot be downloaded: RuntimeError: no acme/sql at v1"):
        await resolve_source("hf", "acme/sql", "v1", tmp_path, {"PYTHONPATH": str(tmp_path)})


async def test_download_gives_the_snapshot(tmp_path: Path) -> None:
    made: Any = adapter_at(tmp_path / "snapshot")
    (tmp_path / "huggingface_hub.py").write_text(
        f"def snapshot_download(name, revision):\n    assert revision is None\n    return {str(made)!r}\n"
    )
    found = await resolve_source("hf", "acme/sql", "", tmp_path, {"PYTHONPATH": str(tmp_path)})
    assert found == str(made)
