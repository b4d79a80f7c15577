"""e. An engine argument changes under load: every engine is replaced, and no request fails."""

from __future__ import annotations

import json
import time

from e2e.lib.client import Prompt
from e2e.lib.kube import Cluster, uids
from e2e.lib.load import ClosedLoop, Load, unique_text
from e2e.lib.metrics import GatewayClient
from e2e.lib.service import START_S, Service
from e2e.lib.wait import wait_until

USERS = 3


def test_rolling_update_fails_no_request(pd: Service, cluster: Cluster, gateway: GatewayClient) -> None:
    def prompts(n: int) -> Prompt:
        return Prompt(unique_text(200, f"e {start} {n}"), max_tokens=64)

    start = time.time()
    first = uids(pd.pods())
    before = gateway.prefill_counts(pd.key)
    changed = {"spec": {"engine": {"args": ["--max-num-seqs", "12"]}}}
    with Load(pd.target, ClosedLoop(USERS, prompts, think_s=0.5)) as load:
        cluster.patch("inferenceservices", pd.name, pd.namespace, changed)
        wait_until(
            "every engine is new", lambda: pd.is_ready() and not uids(pd.pods()).items() & first.items(), 3 * START_S
        )
        seconds = time.time() - start
    roads = gateway.prefill_counts(pd.key) - before
    print(f"{load.ledger.summary()}\n{len(first)} engines replaced in {seconds:.0f} s; prefills {dict(roads)}")
    assert not load.ledger.failures, load.ledger.explain()
    args = [_env(pod, "PLIMSOLL_ARGS") for pod in pd.pods()]
    assert all(json.loads(value) == ["--max-num-seqs", "12"] for value in args), args


def _env(pod: dict[str, object], name: str) -> str:
    spec = pod["spec"]
    assert isinstance(spec, dict)
    return str(next(e["value"] for e in spec["containers"][0]["env"] if e["name"] == name))
