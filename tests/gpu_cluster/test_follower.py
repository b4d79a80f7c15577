"""Another autoscaler on a real node: what it sees, what it orders, and the rows that the page has of it."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from e2e.gpu import follower, policy_process, policy_table, scenarios

DATA = Path(scenarios.__file__).parent / "data"
SLO = {"share": 0.95, "ttft_s": 0.5, "tpot_s": 0.05}
BUCKETS = ("0.1", "0.5", "2.5", "+Inf")


def _pod(name: str, *, ready: bool = True, **metadata: str) -> dict[str, Any]:
    conditions = [{"type": "Ready", "status": str(ready)}]
    metadata |= {"name": name, "creationTimestamp": ""}
    return {"kind": "Pod", "metadata": metadata, "status": {"conditions": conditions}}


def _seen(now_s: float, pages: dict[str, str], starting: int = 0) -> dict[str, Any]:
    return {"now_s": now_s, "desired": 1, "ready": len(pages), "starting": starting, "pages": pages}


def _page(running: int, waiting: int, slow: int = 0) -> str:
    """A page of an engine with so many requests, of which `slow` had their first token after 2.5 s."""
    counts = "".join(
        f'vllm:{name}_bucket{{le="{edge}"}} {slow * (edge == "+Inf")}\n'
        for name in ("time_to_first_token_seconds", "request_time_per_output_token_seconds")
        for edge in BUCKETS
    )
    sums = f"vllm:time_to_first_token_seconds_sum 0\nvllm:request_time_per_output_token_seconds_sum {slow}\n"
    return f"vllm:num_requests_running {running}\nvllm:num_requests_waiting {waiting}\n{counts}{sums}"


def test_follower_sees_engines_that_stay() -> None:
    objects = [
        {"kind": "Deployment", "metadata": {"name": "n-serve"}, "spec": {"replicas": 7}},
        {"kind": "Deployment", "metadata": {"name": "m-serve"}, "spec": {"replicas": 2}},
        _pod("m-serve-a"),
        _pod("m-serve-b", ready=False),
        _pod("m-serve-c", deletionTimestamp="now"),
        _pod("n-serve-d"),
    ]
    seen = follower.observe(3.0, objects, lambda pod: f"page of {pod['metadata']['name']}")
    assert seen == {"now_s": 3.0, "desired": 2, "ready": 1, "starting": 1, "pages": {"m-serve-a": "page of m-serve-a"}}
    with pytest.raises(LookupError, match="m-serve"):
        follower.observe(3.0, objects[:1], str)


def test_policy_process_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deployment = {"kind": "Deployment", "metadata": {"name": "m-serve"}, "spec": {"replicas": 1}}
    monkeypatch.setattr(follower, "get", lambda *words: {"items": [deployment]})
    hangs = "import signal, sys; print('{}', flush=True); input(); open(sys.argv[1], 'w').close(); signal.pause()"
    read = tmp_path / "read"
    os.mkfifo(read)
    monkeypatch.setattr(follower, "_command", lambda scenario: [sys.executable, "-c", hangs, str(read)])
    for name, value in (("LOGS", tmp_path), ("START_S", 0.0), ("_END_S", 0.2)):
        monkeypatch.setattr(follower, name, value)
    with follower.Follower(scenarios.SCENARIOS["step-hpa"], mock.Mock()) as hanging:
        assert read.read_bytes() == b""  # it has the first line
    assert "hpa-concurrency: the policy's process ended" in hanging.error
    assert hanging.samples == []


def test_hpa_counts_running_and_waiting_at_its_period() -> None:
    policy = policy_process.make_policy("hpa-concurrency", 1, 2, SLO)
    assert policy_process.decide(policy, _seen(0.0, {"a": _page(10, 5)})) == {"replicas": 1, "engines": {"a": [10, 5]}}
    assert policy_process.decide(policy, _seen(10.0, {"a": _page(10, 30)}))["replicas"] is None
    assert policy_process.decide(policy, _seen(15.0, {"a": _page(10, 30)}))["replicas"] == 2


def test_hpa_keeps_its_count_without_metrics() -> None:
    policy = policy_process.make_policy("hpa-concurrency", 1, 2, SLO)
    found = policy_process.decide(policy, _seen(0.0, {"a": "ConnectionRefusedError"}))
    assert found == {"replicas": 1, "engines": {"a": [None, None]}}


def test_keda_scales_up_by_latency(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seen = [_seen(5.0 * tick, {"a": _page(10, 5, slow=9 * tick)}) for tick in range(13)]
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(json.dumps(one) + "\n" for one in seen)))
    policy_process.main("keda-ttft", "1", "2", json.dumps(SLO))
    ready, *answers = capsys.readouterr().out.splitlines()
    assert ready == "{}"
    orders = [json.loads(line)["replicas"] for line in answers]
    assert [order for order in orders if order is not None] == [1, 1, 2, 2, 2]
    assert orders[1:3] == [None, None]


@pytest.mark.parametrize(("option", "mode"), [("", "Off"), (":gated=1", "Recommend")])
def test_another_policy_has_a_gate_only_if_asked(option: str, mode: str) -> None:
    spec = scenarios.manifest(scenarios.Scenario("x", 1, 2, (), policy=f"keda-ttft{option}"))["spec"]
    assert spec["scaling"]["mode"] == mode
    assert ("slo" in spec) == bool(option)


def test_policies_have_the_same_load() -> None:
    steps = [one for name, one in scenarios.SCENARIOS.items() if name.startswith("step")]
    assert {one.policy.partition(":")[0] for one in steps} == {"plimsoll", "hpa-concurrency", "keda-ttft"}
    assert len({str(scenarios.trace(one, 10.0)) for one in steps}) == 1


def test_table_has_result_and_prediction() -> None:
    figures = {"within": 30, "share": 0.6, "statuses": {"200": 40, "429": 10}, "ttft_p95": 1.5, "tpot_p95": 0.02}
    result = {"trace_sha256": "t", "figures": {"all": figures}, "late": [{"complete": 40}], "gpu_s": 360.0}
    said = {"trace_sha256": "t", "policies": {"keda-ttft:gated=1": {"attainment_offered": 0.5, "gpu_hours": 0.2}}}
    (row,) = policy_table.rows({"step-keda-gated": result, "zero": {}}, {"step-keda-gated": said})
    assert row == (
        "| `step-keda-gated` | KEDA's SLO law, with the gate | 60.0 %, predicted 50.0 % | 75.0 % | 1,500 ms | 20 ms "
        "| 360, predicted 720 | 40 × 200, 10 × 429 |"
    )
    with pytest.raises(ValueError, match="another trace"):
        list(policy_table.rows({"step-keda-gated": result | {"trace_sha256": "u"}}, {"step-keda-gated": said}))


def test_policies_were_predicted_on_one_load() -> None:
    predicted = json.loads((DATA / "predictions-h100-8b-policies.json").read_text())
    assert {"step", "step-hpa", "step-keda"} <= predicted.keys()
    assert len({predicted[name]["trace_sha256"] for name in predicted if name.startswith("step")}) == 1
