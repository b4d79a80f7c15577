"""c. The prefill tier is deleted under load: decode engines prefill by themselves, and the tier comes back."""

from __future__ import annotations

import time

from e2e.lib.client import Prompt
from e2e.lib.kube import Cluster, Object, uids
from e2e.lib.load import ClosedLoop, Load, unique_text
from e2e.lib.metrics import GatewayClient
from e2e.lib.service import START_S, Service
from e2e.lib.wait import wait_until

USERS = 3
ENOUGH = 10  # requests on a road, to say that it is taken
FOLLOW_S = 180.0  # patience for so many, on a busy machine


def _missing_tier(pd: Service) -> Object | None:
    """The condition that names the prefill tier."""
    found = pd.condition("Reconciling")
    return found if found.get("status") == "True" and found["message"].startswith("prefill: ") else None


def test_prefill_tier_deletion_fails_no_request_and_recovers(
    pd: Service, cluster: Cluster, gateway: GatewayClient
) -> None:
    def prompts(n: int) -> Prompt:
        return Prompt(unique_text(250, f"c {start} {n}"), max_tokens=24)

    start = time.time()
    first = uids(pd.pods("prefill"))
    before = gateway.prefill_counts(pd.key)
    with Load(pd.target, ClosedLoop(USERS, prompts, think_s=0.5)) as load:
        wait_until("prefill is remote", lambda: (gateway.prefill_counts(pd.key) - before)["remote"] > ENOUGH, FOLLOW_S)
        with_tier = gateway.prefill_counts(pd.key) - before
        cluster.delete("deployments", f"{pd.name}-prefill", namespace=pd.namespace, wait=False)
        cluster.kubectl("delete", "pods", "-n", pd.namespace, *first, "--force", "--grace-period=0", "--wait=false")
        gone_at = time.time()
        condition = wait_until("that the tier is missing is told", lambda: _missing_tier(pd))
        wait_until(
            "local prefill is counted",
            lambda: (gateway.prefill_counts(pd.key) - before)["local"] > ENOUGH,
            FOLLOW_S,
        )
        wait_until(
            "the prefill tier is back",
            lambda: pd.is_ready() and uids(pd.pods("prefill")).keys() - first.keys(),
            START_S,
        )
        back_at = time.time()
        again = gateway.prefill_counts(pd.key)
        wait_until(
            "prefill is remote again", lambda: (gateway.prefill_counts(pd.key) - again)["remote"] > ENOUGH, FOLLOW_S
        )
    roads = gateway.prefill_counts(pd.key) - before
    print(load.ledger.summary())
    print(f"prefills before {dict(with_tier)}, in all {dict(roads)}; back after {back_at - gone_at:.0f} s")
    print(f"{condition['reason']}: {condition['message']}")
    assert not load.ledger.failures, load.ledger.explain()
    assert with_tier["remote"] > 0
    assert pd.condition("Ready")["status"] == "True"
