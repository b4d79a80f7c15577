"""Prompts that share prefixes, on two and three engines with real vLLM: hits by the engines' own counters.

Each conversation begins with a text of its own that all its turns repeat and extend. The ideal is what one endless
cache would take from the turn before, in whole blocks of the engine. A conversation asks turn by turn, so that the
turn before is always cached somewhere: what is not hit went to the wrong engine, or was evicted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise

import pytest

from e2e.lib import stack
from e2e.lib.client import Prompt
from e2e.lib.kube import Cluster
from e2e.lib.load import ClosedLoop, Load, unique_text
from e2e.lib.metrics import GatewayClient, Samples
from e2e.lib.node import has_ended, main_process, signal_container
from e2e.lib.request_log import RequestRecord, nearest_rank
from e2e.lib.service import START_S, Service, make_manifest
from e2e.lib.wait import wait_until
from plimsoll.api import labels

SLO = {"ttft": "30s", "tpot": "5s"}  # loose: no request is rejected, and the engine with the cached prefix is in time
USERS, TURNS, CONVERSATIONS = 5, 5, 4  # conversations one after the other for each user
BEGIN_WORDS, TURN_WORDS, TURN_LABEL = 300, 60, "turn"
IDEAL_SHARE = 0.9
LOAD_S = 600.0  # patience for all turns
NEW_SHARE_AFTER_S = 60.0
CLOSE = (("connection", "close"),)  # each request on a connection of its own, so that every gateway gets some
HITS, SUCCEEDED, CACHE = "vllm:prefix_cache_hits_total", "vllm:request_success_total", "vllm:cache_config_info"


@dataclass(frozen=True)
class Run:
    """What the clients of one load and the engines' counters say of it. hits, ideal: prompt tokens."""

    records: list[RequestRecord]
    hits: float
    ideal: int
    by_pod: dict[str, float]

    @property
    def share(self) -> float:
        return self.hits / self.ideal

    def __str__(self) -> str:
        ttft = sorted(record.ttft_s for record in self.records if record.ttft_s is not None)
        return (
            f"{self.hits:.0f} of {self.ideal} ideal tokens ({self.share:.1%}), {len(self.records)} requests, "
            f"p95 TTFT {nearest_rank(ttft, 95)} s, by pod {self.by_pod}"
        )


@pytest.fixture(scope="module")
def prefixes(cluster: Cluster, namespace: str, shared: dict[str, Service]) -> Service:
    cluster.apply(
        make_manifest("prefixes", {"serve": {"minReplicas": 2, "maxReplicas": 2}}, slo=SLO), namespace=namespace
    )
    service = Service(cluster, namespace, "prefixes", shared["solo"].url)
    service.wait_ready()
    return service


@pytest.fixture
def two_gateways(cluster: Cluster, gateway: GatewayClient) -> Iterator[None]:
    before = len(stack.gateway_pods(cluster))
    stack.scale_gateways(cluster, 2)
    wait_until("each gateway can ask the other", gateway.has_all_peers, 60)
    yield
    stack.scale_gateways(cluster, before)


def turns(seed: str, headers: tuple[tuple[str, str], ...] = ()) -> Callable[[int], Prompt]:
    """The turns of one user: turn n of a conversation is the turn before and more."""

    def prompt(n: int) -> Prompt:
        conversation, turn = divmod(n, TURNS)
        parts = [unique_text(BEGIN_WORDS, f"{seed} {conversation}")]
        parts += [unique_text(TURN_WORDS, f"{seed} {conversation} {k}") for k in range(turn)]
        labelled = ((TURN_LABEL, str(turn)),)
        return Prompt(" ".join(parts), max_tokens=4, chat=False, headers=headers, labels=labelled)

    return prompt


def engine_samples(service: Service) -> dict[str, Samples]:
    return {pod: service.engine_metrics(pod) for pod in service.ready_pods("serve")}


def ideal_tokens(records: list[RequestRecord], block: int) -> int:
    """Tokens of whole blocks that each turn of one user has in common with the turn before."""
    ordered, total = sorted(records, key=lambda record: record.sent_at), 0
    for before, record in pairwise(ordered):
        if dict(record.labels)[TURN_LABEL] != "0":
            total += before.prompt_tokens // block * block
    return total


def run_turns(service: Service, seed: str, headers: tuple[tuple[str, str], ...] = ()) -> Run:
    """All turns of all users, on engines that neither come nor go meanwhile."""
    before = engine_samples(service)
    block = int(next(iter(next(iter(before.values())).by(CACHE, "block_size"))))
    wanted = TURNS * CONVERSATIONS
    with ExitStack() as running:
        plans = [ClosedLoop(1, turns(f"{seed} {user}", headers)) for user in range(USERS)]
        loads = [running.enter_context(Load(service.target, plan)) for plan in plans]
        wait_until("all turns are answered", lambda: all(len(x.ledger.records) >= wanted for x in loads), LOAD_S)
    after = engine_samples(service)
    assert after.keys() == before.keys()
    for load in loads:
        assert not load.ledger.failures, load.ledger.explain()
    delta = {pod: after[pod] - before[pod] for pod in before}
    found = Run(
        [record for load in loads for record in load.ledger.records],
        sum(samples.total(HITS) for samples in delta.values()),
        sum(ideal_tokens(load.ledger.records, block) for load in loads),
        {pod: samples.total(SUCCEEDED) for pod, samples in delta.items()},
    )
    print(f"{seed}: {found}")
    return found


def test_turns_reach_the_engine_that_has_their_prefix(prefixes: Service) -> None:
    found = run_turns(prefixes, "plain")
    assert found.share >= IDEAL_SHARE, str(found)
    assert all(found.by_pod.values()), f"one engine got everything: {found}"


def test_turns_through_two_gateways_reach_their_engine(prefixes: Service, two_gateways: None) -> None:
    found = run_turns(prefixes, "two gateways", CLOSE)
    assert found.share >= IDEAL_SHARE, str(found)


def test_new_conversations_hit_after_an_engine_was_killed(prefixes: Service, cluster: Cluster) -> None:
    """The gateway forgets what the killed engine had: conversations that begin later have their hits."""
    pod = cluster.get("pods", prefixes.ready_pods("serve")[0], prefixes.namespace)
    assert pod
    process = main_process(pod, "engine")
    signal_container(pod, "engine", "KILL")
    wait_until("the engine's processes have ended", lambda: has_ended(process), every_s=0.1)
    prefixes.wait_condition("Reconciling", status="True")
    wait_until("the engine is back", prefixes.is_ready, START_S)
    found = run_turns(prefixes, "killed")
    assert found.share >= IDEAL_SHARE, str(found)


def test_new_engine_gets_its_share_within_a_minute(prefixes: Service, cluster: Cluster) -> None:
    known = set(prefixes.ready_pods("serve"))
    tiers = {"serve": {"minReplicas": 3, "maxReplicas": 3}}
    with ExitStack() as running:
        for user in range(USERS):
            running.enter_context(Load(prefixes.target, ClosedLoop(1, turns(f"joined {user}"))))
        cluster.patch(labels.PLURAL, prefixes.name, prefixes.namespace, {"spec": {"tiers": tiers}})
        wait_until("a third engine is ready", lambda: set(prefixes.ready_pods("serve")) - known, START_S)
        ready_at = time.time()
        wait_until("a minute has passed", lambda: time.time() - ready_at > NEW_SHARE_AFTER_S, 2 * NEW_SHARE_AFTER_S)
        wait_until("the service is settled", prefixes.is_ready, START_S)
        found = run_turns(prefixes, "after a minute")
    (new,) = found.by_pod.keys() - known
    share = found.by_pod[new] / sum(found.by_pod.values())
    assert share >= 0.5 / len(found.by_pod), f"the new engine has {share:.0%} of the requests: {found}"
