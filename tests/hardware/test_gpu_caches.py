"""The measurement of engines' caches on a GPU, where no GPU is needed: trace, KV events, summaries, results."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from bench.gpu_engine import caches, check, prefix_routing, prefix_trace
from bench.gpu_engine.kv_events import EventIndex
from plimsoll.core.engine_model.step_time import EngineLimits

DATA = Path(check.__file__).parent / "data"
PAGE = Path(check.__file__).parents[2] / "docs/evaluation/gpu-engine.md"
SESSIONS = prefix_trace.sessions(30.0, 3.0, seed=27)
LIMITS = EngineLimits(256, 131_072, 8192)


def stored(blocks: list[int], parent: int | None, token_ids: list[int], **fields: Any) -> dict[str, Any]:
    event = {"type": "BlockStored", "block_hashes": blocks, "parent_block_hash": parent, "token_ids": token_ids}
    return event | {"block_size": 2, "medium": "GPU"} | fields


def outcome(cached: int, index: int, events: int, best: int = 0, **fields: Any) -> prefix_routing.Outcome:
    values: dict[str, Any] = {"kind": "chat", "engine": "left", "prompt": 1000, "ideal": 800, "ttft_s": 0.1, "ok": True}
    values |= fields
    return prefix_routing.Outcome(index=index, events=events, best_events=best, cached=cached, **values)


def test_later_turn_begins_with_the_one_before() -> None:
    session = next(one for one in SESSIONS if len(one.turns) > 1 and one.tools)
    first = prefix_trace.prompt_tokens(prefix_trace.body(session, 0, []))
    later = prefix_trace.prompt_tokens(prefix_trace.body(session, 1, ["w5 w6"]))
    assert later[: len(first) + 2] == [*first, 5, 6]


def test_prompt_has_the_words_of_tools_and_messages() -> None:
    document = prefix_trace.body(prefix_trace.Session("tools", "w1 w2", "", (prefix_trace.Turn(0.0, "w3", 4),)), 0, [])
    assert prefix_trace.prompt_tokens(document) == [1, 2, 3]
    assert document["max_tokens"] == 4


def test_ideal_cache_counts_whole_blocks_that_came_before() -> None:
    cache, prompt = prefix_trace.IdealCache(), list(range(40))
    assert cache.hits(prompt) == 0
    cache.add(prompt)
    assert cache.hits([*prompt, 1, 2]) == 32
    assert cache.hits([9, *prompt]) == 0


def test_ideal_cache_leaves_a_token_to_compute() -> None:
    cache, prompt = prefix_trace.IdealCache(), list(range(32))
    cache.add(prompt)
    assert cache.hits(prompt) == 16


def test_event_index_follows_parents() -> None:
    index = EventIndex()
    index.apply(stored([7, 8], None, [1, 2, 3, 4]))
    index.apply(stored([9], 8, [5, 6]))
    assert index.hits([1, 2, 3, 4, 5, 6, 0], 2) == 6
    assert index.hits([1, 2, 9, 9], 2) == 2
    assert index.hits([3, 4, 5, 6], 2) == 0


def test_event_index_forgets_removed_blocks() -> None:
    index = EventIndex()
    index.apply(stored([7, 8], None, [1, 2, 3, 4]))
    index.apply({"type": "BlockRemoved", "block_hashes": [8, 99], "medium": "GPU"})
    assert (index.hits([1, 2, 3, 4, 5], 2), len(index)) == (2, 1)
    index.apply({"type": "AllBlocksCleared"})
    assert (index.hits([1, 2, 3], 2), len(index)) == (0, 0)


def test_event_index_ignores_blocks_in_cpu_memory() -> None:
    index = EventIndex()
    index.apply(stored([7], None, [1, 2], medium="CPU"))
    assert index.hits([1, 2, 3], 2) == 0


def test_gateway_believes_what_it_sent() -> None:
    async def sent() -> tuple[str, dict[str, int]]:
        model = prefix_routing.cost_model(SESSIONS, LIMITS)
        gateway = prefix_routing.Gateway(model, ["left", "right"], 1.0, prefix_aware=True)
        document = prefix_trace.body(SESSIONS[0], 0, [])
        prompt = len(prefix_trace.prompt_tokens(document))
        engine = await gateway.pick(gateway.request("a", document, prompt))
        return engine, gateway.believed(gateway.request("b", document, prompt), {})

    engine, believed = asyncio.run(sent())
    other = "left" if engine == "right" else "right"
    assert believed[engine] > 0
    assert believed[other] == 0


def test_gateway_with_events_goes_where_they_say() -> None:
    async def picked() -> tuple[str, dict[str, int]]:
        model = prefix_routing.cost_model(SESSIONS, LIMITS)
        gateway = prefix_routing.Gateway(model, ["left", "right"], 1.0, prefix_aware=True, events=True)
        document = prefix_trace.body(SESSIONS[0], 0, [])
        request = gateway.request("a", document, len(prefix_trace.prompt_tokens(document)))
        believed = gateway.believed(request, {"left": 0, "right": 512})
        return await gateway.pick(request), believed

    engine, believed = asyncio.run(picked())
    assert engine == "right"
    assert believed["left"] == 0
    assert believed["right"] == pytest.approx(512, abs=prefix_routing.FAR_TOKENS)


def test_summary_tells_errors_of_both_beliefs() -> None:
    rows = [outcome(400, 100, 400, 700), outcome(0, 0, 160, 0, kind="tools", ok=False)]
    summary = prefix_routing.summarise(rows)
    assert summary["hits_of_ideal"] == 0.25
    assert summary["hits_of_ideal_by_kind"] == {"chat": 0.5, "tools": 0.0}
    assert summary["index"] == {
        "predicted_of_cached": 0.25, "mean_abs_error_tokens": 150.0, "too_high": 0.0, "too_low": 0.5,
    }  # fmt: skip
    assert summary["events"]["too_high"] == 0.5
    assert summary["missed_of_ideal"] == pytest.approx(300 / 1600, abs=1e-4)
    assert summary["failed"] == 1


def test_summary_without_requests_is_refused() -> None:
    with pytest.raises(ValueError, match="no request"):
        prefix_routing.summarise([])


def test_counters_keep_other_labels_and_grow() -> None:
    page = 'vllm:prefix_cache_hits_total{engine="0",model_name="m"} 5.0\nvllm:prefix_cache_hits_created{a="b"} 9\nx 1\n'
    before = caches.counters(page)
    assert list(before.values()) == [5.0]
    after = caches.counters(page.replace("5.0", "8.0"))
    assert list(caches.difference(after, before).values()) == [3.0]


def kept(part: str, name: str) -> dict[str, Any]:
    document = json.loads((DATA / "h200-caches.json").read_text())
    return next(check for check in document[part] if check["check"] == name)


def test_stored_result_passed_every_check() -> None:
    assert json.loads((DATA / "h200-caches.json").read_text())["failed"] == []


@pytest.mark.parametrize(
    ("part", "arm", "row"),
    [
        ("first", "least work, 1 gateway", "| 1 | least work | 85.4 % | 87.5 % | 79.5 % | 79.0 % | 0.194 s |"),
        ("first", "affinity, 1 gateway", "| 1 | affinity | 99.6 % | 100.0 % | 98.9 % | 98.2 % | 0.119 s |"),
        ("second", "KV events, 1 gateway", "| 1 | KV events | 99.6 % | 100.0 % | 99.2 % | 98.0 % | 0.127 s |"),
        ("first", "affinity, 2 gateways", "| 2 | affinity | 91.2 % | 92.2 % | 89.8 % | 86.9 % | 0.176 s |"),
        ("second", "affinity, 2 gateways", "| 2 | affinity, again | 92.6 % | 93.3 % | 91.4 % | 90.0 % | 0.187 s |"),
        ("second", "KV events, 2 gateways", "| 2 | KV events | 96.9 % | 97.4 % | 94.3 % | 96.1 % | 0.149 s |"),
    ],
)
def test_page_has_the_hits_of_the_stored_result(part: str, arm: str, row: str) -> None:
    found = kept(part, f"prefix: {arm}")
    kinds = found["hits_of_ideal_by_kind"]
    shares = [found["hits_of_ideal"], kinds["tools"], kinds["few-shot"], kinds["chat"]]
    figures = [*(f"{100 * share:.1f} %" for share in shares), f"{found['p95_ttft_s']:.3f} s"]
    assert row.endswith(f" | {' | '.join(figures)} |")
    assert row in PAGE.read_text()


@pytest.mark.parametrize("tokens", [2000, 8000, 16000])
def test_page_has_the_offload_figures(tokens: int) -> None:
    found = kept("memory", f"offload: {tokens} tokens come back from CPU memory")
    row = " | ".join(f"{found[name]:.0f} ms" for name in ("new_ms", "gpu_ms", "cpu_ms"))
    assert f"| {tokens:,} | {row} |" in PAGE.read_text()
