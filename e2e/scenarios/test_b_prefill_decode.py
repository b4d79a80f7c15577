"""b. Prefill and decode: the KV cache of every prompt moves, nothing is computed twice, and the words are the same."""

from __future__ import annotations

import time

from e2e.lib.client import Prompt
from e2e.lib.load import Arrival, Load, OpenLoop, unique_text
from e2e.lib.metrics import Gateway, prompt_sources
from e2e.lib.prober import Prober
from e2e.lib.service import Service

WORDS = (130, 300, 500, 700, 900, 1100)
PROMPTS = [
    Prompt(unique_text(words, f"b {time.time_ns()} {words}"), max_tokens=24, chat=words % 200 > 100) for words in WORDS
]
PLAN = [Arrival(0.5 * n, prompt) for n, prompt in enumerate(PROMPTS)]


def test_every_prompt_token_moves_and_none_is_computed_again(pd: Service, prober: Prober, gateway: Gateway) -> None:
    start = time.time()
    with prober.held():
        before, roads = pd.metrics("decode"), gateway.prefills(pd.key)
    ledger = Load(pd.target, OpenLoop(PLAN)).run()
    with prober.held():
        moved = prompt_sources(pd.metrics("decode") - before)
        roads = gateway.prefills(pd.key) - roads
        probes = prober.ledger(start, pd.name)
    assert not ledger.failures, ledger.explain()
    sent = ledger.prompt_tokens + probes.prompt_tokens
    print(f"{len(PROMPTS)} requests and {len(probes.records)} probes with {sent} prompt tokens")
    print(f"decode tier got {moved}; gateway {dict(roads)}")
    assert moved["external_kv_transfer"] == sent
    assert moved.get("local_compute", 0) == 0
    assert roads["remote"] == len(PROMPTS) + len(probes.records)
    assert roads["local"] == 0


def test_the_words_equal_those_of_an_aggregated_engine(pd: Service, solo: Service) -> None:
    by_two = Load(pd.target, OpenLoop(PLAN)).run()
    by_one = Load(solo.target, OpenLoop(PLAN)).run()
    assert not by_two.failures, by_two.explain()
    assert not by_one.failures, by_one.explain()
    texts = {r.prompt_tokens: r.text for r in by_one.records}
    same = sum(texts[r.prompt_tokens] == r.text for r in by_two.records)
    print(f"{same} of {len(PLAN)} answers equal, prompts of {sorted(texts)} tokens")
    assert same == len(PLAN)


def test_a_client_cannot_name_a_prefill_host(pd: Service, prober: Prober) -> None:
    """Transfer parameters can point at any host and at other tenants' blocks: they are dropped."""
    prompt = PROMPTS[1]
    engine = pd.ready_pods("decode")[0]
    stolen = {
        "do_remote_prefill": True,
        "remote_host": "127.0.0.1",
        "remote_port": 1,
        "remote_engine_id": "x",
        "remote_block_ids": [[1]],
        "remote_request_id": "y",
        "remote_num_tokens": 64,
        "tp_size": 1,
    }
    body = {**prompt.body(pd.name), "stream": False, "stream_options": None}
    with prober.held():
        before = pd.engine_metrics(engine)
        honest = pd.ask_engine(engine, prompt.path, body)
        crooked = pd.ask_engine(engine, prompt.path, {**body, "kv_transfer_params": stolen})
        failed = (pd.engine_metrics(engine) - before).total("vllm:nixl_num_failed_transfers_total")
    words = [[c.get("text") or c["message"]["content"] for c in answer["choices"]] for answer in (honest, crooked)]
    print(f"failed transfers {failed:.0f}; same words {words[0] == words[1]}")
    assert failed == 0
    assert words[0] == words[1]
