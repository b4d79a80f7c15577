"""Page and README quote what was kept of two services, load tools and twenty minutes of a trace."""

from __future__ import annotations

import itertools
import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from e2e.gpu import scenarios

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "e2e" / "gpu" / "data"
PAGE = " ".join((ROOT / "docs" / "evaluation" / "gpu-cluster.md").read_text().replace("**", "").split())
PART = PAGE[PAGE.index("## Two services") : PAGE.index("## The trace and more")]
README = " ".join((ROOT / "README.md").read_text().split())
RESULTS: dict[str, Any] = json.loads((DATA / "h200-8b-rivals" / "results.json").read_text())
LATER: dict[str, Any] = json.loads((DATA / "h200-8b-long" / "results.json").read_text())
PREDICTED: dict[str, Any] = json.loads((DATA / "predictions-h100-8b-failures.json").read_text())
BY_HAND: dict[str, Any] = json.loads((DATA / "predictions-two-gpus-by-hand.json").read_text())
LONG: dict[str, Any] = json.loads((DATA / "predictions-h100-8b-long-trace.json").read_text())["long-trace"]
RIVALS = RESULTS["rivals"]
TRACE = LATER["long-trace"]
TRACE_PART = PAGE[PAGE.index("## Twenty minutes") : PAGE.index("## Two services")]
STATIC_S = 2 * scenarios.SCENARIOS["rivals"].seconds


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _gpu_seconds(service: str, seconds: float) -> float:
    """Of one service: each of its pods from its creation until it is gone."""
    total, last = 0.0, {"at": seconds}
    for now, after in itertools.pairwise([*RIVALS["changes"], last]):
        pods = sum(pod["name"].startswith(f"{service}-") for pod in now["pods"])
        total += pods * max(0.0, min(after["at"], seconds) - max(now["at"], 0.0))
    return total


def test_rivals_have_the_predicted_trace(tmp_path: Path) -> None:
    digest = scenarios.write_trace(scenarios.SCENARIOS["rivals"], PREDICTED["capacity_per_s"], tmp_path / "trace.csv")
    assert digest == RIVALS["trace_sha256"] == PREDICTED["rivals"]["trace_sha256"]


def test_row_of_the_rivals() -> None:
    figures, row = RIVALS["figures"]["all"], PART[PART.index("| `rivals`") : PART.index("GPU-seconds")]
    assert f"| {figures['offered']:,} | {_percent(figures['share'])}, predicted 87 % |" in row
    assert BY_HAND["rivals"]["within_share"] == 0.87
    assert f"| {figures['ttft_p95'] * 1000:.0f} ms | {figures['tpot_p95'] * 1000:.1f} ms |" in row
    assert " | " + ", ".join(f"{count:,} × {status}" for status, count in figures["statuses"].items()) + " |" in row
    assert f"| {_percent(figures['share'])} | 87 % |" in README


def test_gpu_seconds_and_simulated_policies_of_the_rivals() -> None:
    policies = PREDICTED["rivals"]["policies"]
    ours = _gpu_seconds("m", STATIC_S / 2), 3600 * policies["plimsoll"]["gpu_hours"], STATIC_S
    assert "{:.0f}, simulated {:.0f}; two static engines have {:.0f}".format(*ours) in PART
    said = (
        ("with a free GPU:", "plimsoll"),
        ("engines", "static:2"),
        ("law", "keda-ttft"),
        ("HPA on concurrency", "hpa-concurrency"),
    )
    for words, policy in said:
        assert f"{words} {_percent(policies[policy]['attainment_offered'])}" in PART


def test_times_of_the_rivals() -> None:
    overloaded = RIVALS["codes"]["overloaded"]
    assert f"| {overloaded['first_s']:.1f} to {overloaded['last_s']:.1f} | {overloaded['count']} × 429" in PART
    assert f"{sum(one['ttft'] for one in RIVALS['late'])} of the admitted miss TTFT" in PART
    ready_s = next(
        c["at"] for c in RIVALS["changes"] if sum(pod["ready"] for pod in c["pods"] if pod["name"][0] == "m") == 2
    )
    assert f"| {ready_s} | the second engine is ready" in PART
    assert all(within == offered for second, offered, _, within, *_ in RIVALS["seconds"] if second > ready_s)
    reasons = {event["reason"] for event in RIVALS["events"]}
    assert {"Preempted", "ScaledUp", "ScaledDown"} <= reasons


def test_answers_of_the_second_service() -> None:
    rival = RIVALS["rival"]
    statuses = rival["statuses"]
    assert f"{statuses['503']} of {sum(statuses.values())} short requests to the second service got 503" in PART
    assert f"| {rival['back_s'][0]} | the second service answers again |" in PART
    assert statuses.keys() == {"200", "503"}


def test_rows_of_the_load_tools() -> None:
    found, own = RESULTS["tools"]["tools"], RESULTS["tools"]["figures"]["all"]
    bench, guide = found["vllm bench serve"], found["guidellm"]
    assert (
        f"| {own['offered']} | {own['within']} | {own['ttft_p95'] * 1000:.0f} ms | {own['tpot_p95'] * 1000:.1f} ms |"
        in PART
    )
    assert bench["request_goodput"] == bench["request_throughput"]
    times = f"{bench['p95_ttft_ms']:.0f} ms | {bench['p95_tpot_ms']:.1f} ms |"
    assert f"| {bench['num_prompts']} | {bench['completed']} | {times}" in PART
    requests, ttft, tpot = guide["requests"], guide["time_to_first_token_ms"], guide["time_per_output_token_ms"]
    sent = requests["successful"] + requests["errored"]
    assert f"| {sent} | {requests['successful']} | {ttft['p95']:.0f} ms | {tpot['p95']:.1f} ms |" in PART
    assert f"{requests['errored']} got 429" in PART
    assert (requests["incomplete"], guide["version"]) == (16, "0.8.1")
    assert max(ttft.values()) <= 1000 * scenarios.TTFT_S
    assert max(tpot.values()) <= 1000 * scenarios.TPOT_S


def test_repeated_rivals() -> None:
    rival = LATER["rivals"]["rival"]
    pause_s = LATER["rivals"]["load_began"] - TRACE["load_began"] - TRACE["marks"][-1]["at"]
    assert f"{pause_s:.0f} s after `long-trace`: {_percent(LATER['rivals']['figures']['all']['share'])}." in PART
    assert f"waited from {rival['back_s'][0]} s on, up to {rival['longest_s']:.1f} s" in PART
    ready_s = next(
        change["at"]
        for change in LATER["rivals"]["changes"]
        if change["at"] > rival["back_s"][0] and any(pod["ready"] for pod in change["pods"] if pod["name"][0] == "n")
    )
    assert f"ready at {ready_s} s" in PART
    first = LATER["rivals"]["figures"]["0: 0.5 for 20 s"]
    assert f"reject {first['statuses']['429']} of the first {first['offered']} requests" in PART


def test_long_trace_is_the_predicted_one(tmp_path: Path) -> None:
    digest = scenarios.write_trace(scenarios.SCENARIOS["long-trace"], 1.0, tmp_path / "trace.csv")
    assert digest == LONG["trace_sha256"] == TRACE["trace_sha256"]
    policies = LONG["policies"]
    shares = {name: _percent(one["attainment_offered"]) for name, one in policies.items()}
    seconds = {name: f"{3600 * one['gpu_hours']:,.0f}" for name, one in policies.items()}
    assert f"GPU-seconds: {TRACE['gpu_s']:,.0f}, predicted {seconds['plimsoll']}; two static" in TRACE_PART
    said = (("SLO law", "keda-ttft"), ("concurrency", "hpa-concurrency"), ("one static engine", "static:1"))
    assert all(f"{words} {shares[name]} with {seconds[name]}" in TRACE_PART for words, name in said)
    assert f"two static engines {shares['static:2']}" in TRACE_PART


def test_row_of_the_long_trace() -> None:
    figures = TRACE["figures"]["all"]
    assert figures["share"] >= 0.98
    predicted = _percent(LONG["policies"]["plimsoll"]["attainment_offered"])
    assert f"| {figures['offered']:,} | {_percent(figures['share'])}, predicted {predicted} |" in TRACE_PART
    assert f"| {figures['ttft_p95'] * 1000:.0f} ms | {figures['tpot_p95'] * 1000:.1f} ms |" in TRACE_PART
    assert f"| {', '.join(f'{n:,} × {status}' for status, n in figures['statuses'].items())} |" in TRACE_PART
    saved = 1 - TRACE["gpu_s"] / (2 * scenarios.SCENARIOS["long-trace"].seconds)
    assert f"for {100 * saved:.0f} % fewer GPU-seconds" in TRACE_PART
    assert f"{100 * saved:.0f} % fewer GPU-seconds than two static ones | {_percent(figures['share'])} |" in README


def test_times_of_the_long_trace() -> None:
    late = [sum(phase[target] for phase in TRACE["late"]) for target in ("ttft", "tpot")]
    assert f"{late[0]} miss TTFT and {late[1]} TPOT" in TRACE_PART
    admitted = sum(phase["complete"] for phase in TRACE["late"])
    assert f"{_percent(TRACE['figures']['all']['within'] / admitted)} of the admitted" in TRACE_PART
    rejected = {second: offered - answered for second, offered, answered, *_ in TRACE["seconds"] if offered > answered}
    assert f"| {sum(n for s, n in rejected.items() if s < 300)} × 429 in two bursts" in TRACE_PART
    assert f"| {sum(n for s, n in rejected.items() if 300 < s < 600)} × 429 before the second" in TRACE_PART
    assert sum(n for s, n in rejected.items() if s > 600) == 9
    counts = [(change["at"], sum(pod["ready"] for pod in change["pods"])) for change in TRACE["changes"]]
    second = [at for (at, now), (_, before) in zip(counts[1:], counts, strict=False) if now == 2 > before]
    assert all(f"{at:,}" in TRACE_PART for at in second)
    assert len(second) == 3
    scaled = [
        datetime.fromisoformat(event["at"]).timestamp() - TRACE["load_began"]
        for event in TRACE["events"]
        if event["reason"] in ("ScaledUp", "ScaledDown")
    ]
    assert [f"| {at:,.0f} |" in TRACE_PART for at in sorted(scaled)] == [True] * 4 + [False]
    assert f"{sorted(scaled)[4] - sorted(scaled)[3]:.0f} s later the rate rises, `ScaledUp`" in TRACE_PART


def test_long_trace_has_the_load_of_its_phases() -> None:
    scenario = scenarios.SCENARIOS["long-trace"]
    requests, begin, tokens = scenarios.trace(scenario, 1.0), 0.0, []
    for share, seconds in scenario.phases:
        part = [row.prompt for row in requests if begin <= row.at_s < begin + seconds]
        tokens.append(sum(part) / seconds / share)
        begin += seconds
    assert tokens == pytest.approx([tokens[0]] * len(tokens), rel=0.15)
