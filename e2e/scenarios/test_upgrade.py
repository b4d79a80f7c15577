"""An upgrade of chart, operator and default engine image restarts no engine and fails no request."""

from __future__ import annotations

import time

from e2e.lib import stack
from e2e.lib.client import Prompt
from e2e.lib.kube import Cluster, uids
from e2e.lib.load import ClosedLoop, Load, unique_text
from e2e.lib.service import Service
from e2e.lib.wait import sleep, wait_until

USERS = 2
NEXT = "0.1.99"
SETTLE_S = 10.0


def test_upgrade_restarts_no_engine_and_fails_no_request(shared: dict[str, Service], cluster: Cluster) -> None:
    def prompts(n: int) -> Prompt:
        return Prompt(unique_text(140, f"up {start} {n}"), max_tokens=32)

    def more(n: int) -> Prompt:
        return prompts(-n - 1)

    start = time.time()
    pd, solo = shared["pd"], shared["solo"]
    engines = {s.key: uids(s.pods()) for s in shared.values()}
    operator, engine = stack.retag("operator", "dev", NEXT), stack.retag("engine-cpu", "dev", NEXT)
    chart = stack.chart_copy(NEXT)
    with (
        Load(pd.target, ClosedLoop(USERS, prompts, think_s=0.5)) as one,
        Load(solo.target, ClosedLoop(USERS, more, think_s=0.5)) as two,
    ):
        stack.install(cluster, "--set", f"image.tag={NEXT}", "--set", f"engine.image={engine}", chart=chart)
        wait_until("the new operator has seen each service", lambda: all(s.is_ready() for s in shared.values()), 180)
        sleep(SETTLE_S)
    running = {c["image"] for p in cluster.list("pods", stack.SYSTEM) for c in p["spec"]["containers"]}
    after = {s.key: uids(s.pods()) for s in shared.values()}
    stack.install(cluster)
    back = {s.key: uids(s.pods()) for s in shared.values()}
    print(f"upgrade to {operator}, default engine {engine}, and back")
    print(f"pd: {one.ledger.summary()}\nsolo: {two.ledger.summary()}")
    assert operator in running
    assert after == engines
    assert back == engines
    assert not one.ledger.failures, one.ledger.explain()
    assert not two.ledger.failures, two.ledger.explain()
