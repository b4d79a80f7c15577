"""The engine simulator's LoRA adapters: vLLM's two paths, names, errors and prefix cache."""

from __future__ import annotations

from pathlib import Path

from plimsoll.engines import vllm
from tests.engine_image.middleware_harness import Exchange
from tests.engine_image.simulated.api_harness import ApiHarness, make_harness

LORA = (vllm.ENABLE_LORA, vllm.MAX_LORAS, "2", "--failing-adapters", "/bad")
PROMPT = "one two three four five six seven eight " * 40


async def load(engine: ApiHarness, name: str, path: str = "/a") -> Exchange:
    return await engine.send({"lora_name": name, "lora_path": path}, vllm.LOAD_LORA_PATH)


async def complete(engine: ApiHarness, model: str) -> Exchange:
    return await engine.send({"model": model, "prompt": PROMPT, "max_tokens": 2})


async def hits(engine: ApiHarness) -> float:
    return (await engine.metrics())[("vllm:prefix_cache_hits_total",)]


async def test_loaded_adapter_is_listed_and_served_by_its_name(tmp_path: Path) -> None:
    async with make_harness(tmp_path, *LORA) as engine:
        assert (await complete(engine, "sql")).status == 404
        assert (await load(engine, "sql")).status == 200
        listed = {card["id"]: card["parent"] for card in (await engine.send(path="/v1/models")).json["data"]}
        assert listed == {"m": None, "sql": "m"}
        served = await engine.send({"model": "sql", "prompt": "x"}, bare=True)
        assert (served.status, served.json["model"]) == (200, "sql")


async def test_adapters_share_no_prefix_with_the_model(tmp_path: Path) -> None:
    async with make_harness(tmp_path, *LORA) as engine:
        await load(engine, "sql")
        await load(engine, "law")
        for model in ("m", "sql", "law"):
            await complete(engine, model)
        assert await hits(engine) == 0
        await complete(engine, "sql")
        assert await hits(engine) > 0


async def test_errors_are_vllms(tmp_path: Path) -> None:
    async with make_harness(tmp_path, *LORA) as engine:
        await load(engine, "sql")
        again, bad = await load(engine, "sql"), await load(engine, "law", "/bad")
        gone = await engine.send({"lora_name": "law"}, vllm.UNLOAD_LORA_PATH)
        nameless = await engine.send({}, vllm.LOAD_LORA_PATH)
        assert [one.status for one in (again, bad, gone, nameless)] == [400, 404, 404, 400]
        assert "already been loaded" in again.json["error"]["message"]
        assert "No adapter found for /bad" in bad.json["error"]["message"]


async def test_unloaded_adapter_is_unknown(tmp_path: Path) -> None:
    async with make_harness(tmp_path, *LORA) as engine:
        await load(engine, "sql")
        assert (await engine.send({"lora_name": "sql"}, vllm.UNLOAD_LORA_PATH)).status == 200
        assert (await complete(engine, "sql")).status == 404


async def test_engine_without_lora_has_no_such_path(tmp_path: Path) -> None:
    async with make_harness(tmp_path) as engine:
        assert (await load(engine, "sql")).status == 404
