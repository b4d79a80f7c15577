"""b. Prefill and decode: the KV cache of every prompt moves, nothing is computed twice, and the words are the same."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass

from e2e.lib import remote_prefills
from e2e.lib.client import Prompt
from e2e.lib.load import Arrival, Load, OpenLoop, unique_text
from e2e.lib.metrics import GatewayClient, prompt_sources
from e2e.lib.prober import Prober
from e2e.lib.service import Service

WORDS = (130, 300, 500, 700, 900, 1100)


def _prompts(run: str) -> list[Prompt]:
    return [Prompt(unique_text(n, f"b {run} {n}"), max_tokens=24, chat=n % 200 > 100) for n in WORDS]


def _plan(prompts: list[Prompt]) -> OpenLoop:
    return OpenLoop([Arrival(0.5 * n, prompt) for n, prompt in enumerate(prompts)])


@dataclass(frozen=True)
class Round:
    """What one round of unique prompts did: prompt tokens sent, where the decode tier had them from, by which roads,
    and how its remote prefills ended.
    """

    requests: int
    sent: int
    sources: dict[str, int]
    roads: Counter[str]
    outcomes: dict[str, int]


def _round(pd: Service, prober: Prober, gateway: GatewayClient) -> Round:
    with prober.paused():
        start = time.time()  # what a beat before sent late is in `before`
        before, roads = pd.metrics("decode"), gateway.prefill_counts(pd.key)
    ledger = Load(pd.target, _plan(_prompts(str(start)))).run()
    with prober.paused():
        grown = pd.metrics("decode") - before
        roads = gateway.prefill_counts(pd.key) - roads
        probes = prober.ledger(start, pd.name)
    assert not ledger.failures, ledger.explain()
    outcomes = remote_prefills.outcomes(grown)
    requests, sent = len(ledger.records) + len(probes.records), ledger.prompt_tokens + probes.prompt_tokens
    print(f"{requests} requests, probes among them, with {sent} prompt tokens; remote prefills {outcomes}")
    print(f"decode tier had them from {prompt_sources(grown)}; the gateway said {dict(roads)}")
    return Round(requests, sent, prompt_sources(grown), roads, outcomes)


def test_pd_transfers_all_prompt_kv_without_recompute(pd: Service, prober: Prober, gateway: GatewayClient) -> None:
    found = remote_prefills.first_in_time(lambda: _round(pd, prober, gateway), lambda one: one.outcomes)
    assert found.outcomes == {"remote": found.requests}
    assert found.sources["external_kv_transfer"] == found.sent
    assert found.sources.get("local_compute", 0) == 0
    assert found.roads == {"remote": found.requests}


def test_pd_output_equals_aggregated_engine(pd: Service, solo: Service) -> None:
    plan = _plan(_prompts(str(time.time())))
    by_two, by_one = Load(pd.target, plan).run(), Load(solo.target, plan).run()
    assert not by_two.failures, by_two.explain()
    assert not by_one.failures, by_one.explain()
    texts = {r.prompt_tokens: r.text for r in by_one.records}
    same = sum(texts[r.prompt_tokens] == r.text for r in by_two.records)
    print(f"{same} of {len(WORDS)} answers equal, prompts of {sorted(texts)} tokens")
    assert same == len(WORDS)


def test_client_kv_transfer_params_are_dropped(pd: Service, prober: Prober) -> None:
    """Transfer parameters can point at any host and at other tenants' blocks: they are dropped."""
    prompt = _prompts("host")[1]
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
    with prober.paused():
        before = pd.engine_metrics(engine)
        honest = pd.ask_engine(engine, prompt.path, body)
        crooked = pd.ask_engine(engine, prompt.path, {**body, "kv_transfer_params": stolen})
        failed = (pd.engine_metrics(engine) - before).total("vllm:nixl_num_failed_transfers_total")
    words = [[c.get("text") or c["message"]["content"] for c in answer["choices"]] for answer in (honest, crooked)]
    print(f"failed transfers {failed:.0f}; same words {words[0] == words[1]}")
    assert failed == 0
    assert words[0] == words[1]
