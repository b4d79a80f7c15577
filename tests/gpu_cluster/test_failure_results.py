"""Page and README quote what was kept of failures, kills, adapters and a step, and predictions written before."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from e2e.gpu import scenarios

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "e2e" / "gpu" / "data"
PAGE = " ".join((ROOT / "docs" / "evaluation" / "gpu-cluster.md").read_text().replace("**", "").split())
PART = PAGE[PAGE.index("## Failures, kills, adapters") : PAGE.index("## Twenty minutes")]
README = " ".join((ROOT / "README.md").read_text().split())


def _read(name: str) -> dict[str, Any]:
    return dict(json.loads((DATA / name).read_text()))


RESULTS = _read("h200-8b-third/results.json")
BY_HAND, SIMULATED = _read("predictions-third-by-hand.json"), _read("predictions-h200-8b-third.json")
ADAPTERS = _read("predictions-h200-8b-adapters.json")["lora"]
FIRST, AGAIN = _read("h100-8b-two/results.json"), _read("h200-8b-again/results.json")
STEP = SIMULATED["step"]["policies"]["plimsoll"]
NAMES = ("failures", "kills", "step", "restart", "rollout")


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _row(begin: str) -> str:
    row = PART[PART.index(f"| {begin}") :]
    return row[: row.index(" | |")] if " | |" in row else row


def _all(results: dict[str, Any], name: str) -> dict[str, Any]:
    return dict(results[name]["figures"]["all"])


def _at_s(name: str, reason: str) -> list[int]:
    """Whole seconds of the load at which Events with this reason were sent, from the load's begin on."""
    result = RESULTS[name]
    times = (
        datetime.fromisoformat(one["at"]).timestamp() - float(result["load_began"])
        for one in result["events"]
        if one["reason"] == reason
    )
    return sorted(round(at_s) for at_s in times if at_s > 0)


def _marks(name: str, what: str) -> list[float]:
    return [float(mark["at"]) for mark in RESULTS[name]["marks"] if mark["what"] == what]


@pytest.mark.parametrize("name", [*NAMES, "lora"])
def test_each_load_is_the_predicted_one(name: str, tmp_path: Path) -> None:
    digest = scenarios.write_trace(scenarios.SCENARIOS[name], SIMULATED["capacity_per_s"], tmp_path / "trace.csv")
    assert digest == RESULTS[name]["trace_sha256"] == SIMULATED[name]["trace_sha256"]


@pytest.mark.parametrize(
    ("begin", "found", "predicted", "before"),
    [
        ("`failures`", _all(RESULTS, "failures"), BY_HAND["failures"]["within_share"], _all(FIRST, "failures")),
        ("`kills`", _all(RESULTS, "kills"), BY_HAND["kills"]["within_share"], _all(AGAIN, "kills")),
        ("`lora`: 0.35", _all(RESULTS, "lora"), ADAPTERS["first"]["within_share"], _all(AGAIN, "lora")),
        (
            "`lora`: 0.25",
            RESULTS["lora"]["beside"]["figures"],
            ADAPTERS["beside"]["within_share"],
            AGAIN["lora"]["beside"]["figures"],
        ),
        ("`restart`", _all(RESULTS, "restart"), BY_HAND["restart"]["within_share"], _all(FIRST, "restart")),
        ("`rollout`", _all(RESULTS, "rollout"), BY_HAND["rollout"]["within_share"], _all(FIRST, "rollout")),
        (
            "`step`",
            _all(RESULTS, "step"),
            STEP["attainment_offered"],
            _all(_read("h200-8b-policies/results.json"), "step"),
        ),
    ],
)
def test_row_has_result_prediction_and_the_run_before(
    begin: str, found: dict[str, Any], predicted: float, before: dict[str, Any]
) -> None:
    row = _row(begin)
    shares = f"{_percent(found['share'])}, predicted {_percent(predicted)} | {_percent(before['share'])}"
    assert f"| {found['offered']:,} | {shares} |" in row
    assert f"| {found['ttft_p95'] * 1000:,.0f} ms | {found['tpot_p95'] * 1000:.1f} ms |" in row
    for status, count in found["statuses"].items():
        assert (f"{count} cut" if status == "cut" else f"{count:,} × {status}") in row


def test_kills_cost_fewer_requests_than_standby_engines_do() -> None:
    figures, kills = _all(RESULTS, "kills"), RESULTS["kills"]
    failed = sum(count for status, count in figures["statuses"].items() if status != "200")
    assert f"{failed} of {figures['offered']:,} requests, {_percent(failed / figures['offered'])} (216 before)" in PART
    assert failed / figures["offered"] < BY_HAND["kills"]["goal_failed_share"]
    assert list(kills["codes"]) == ["cut"]
    lost = {second: offered - complete for second, offered, complete, *_ in kills["seconds"] if offered > complete}
    cut = [sum(count for second, count in lost.items() if at_s - 10 < second <= at_s) for at_s in (20, 80, 140)]
    assert sum(cut) == failed
    assert f"{cut[0]}, {cut[1]} and {cut[2]} responses" in PART
    back_s = [end - begin for begin, end in zip(_marks("kills", "killed"), _at_s("kills", "Recovered"), strict=True)]
    assert f"after {back_s[0]:.0f} s, later after {back_s[1]:.0f} and {back_s[2]:.0f}:" in PART


def test_page_has_the_times_of_the_hung_engine() -> None:
    failures = RESULTS["failures"]
    codes, (stopped_s,), (deleted_s,) = failures["codes"], _marks("failures", "stopped"), _marks("failures", "deleted")
    hung, rejected = codes["unavailable"], codes["overloaded"]
    assert f"| {stopped_s:.1f} | SIGSTOP to the core of one engine: its {codes['cut']['count']} responses" in PART
    assert f"| {hung['first_s']:.1f} to {hung['last_s']:.1f} | {hung['count']} requests are sent there" in PART
    ended_s, (back_s, successor_s) = _at_s("failures", "EngineFailing")[0], _at_s("failures", "Recovered")
    assert f"| {ended_s} | it is restarted after 40 s without progress (Event), and ready at {back_s} |" in PART
    gone_s = next(one["at"] for one in failures["changes"] if one["at"] > deleted_s + 5)
    assert f"| {deleted_s:.0f} | the pod of this engine is deleted; it drains until {gone_s:.0f}." in PART
    assert f"Its successor is ready at {successor_s}" in PART
    assert f"| {rejected['first_s']:.1f} to {rejected['last_s']:.1f} | {rejected['count']} × 429" in PART
    before = FIRST["failures"]["codes"]["unavailable"]["count"]
    assert f"{before} in the run before" in PART


def test_page_has_what_adapters_cost() -> None:
    lora, kills = RESULTS["lora"], RESULTS["kills"]["limits"]["costModel"]
    cost = lora["limits"]["costModel"]
    assert f"{1e6 * cost['prefill_token_s']:.0f} µs and each sequence {1e6 * cost['sequence_s']:.0f} µs" in PART
    assert f"without LoRA {1e6 * kills['prefill_token_s']:.0f} and {1e6 * kills['sequence_s']:.0f}" in PART
    assert f"a batch of {cost['batch']}, in `kills` {kills['batch']}" in PART
    assert f"TPOT was {1000 * _all(RESULTS, 'lora')['tpot_p50']:.1f} ms at the median" in PART
    after = _read("after-h200-8b-adapters.json")
    for key, words in (("as_run", "Simulated again with half the speed:"), ("mended", "simulated at half the speed")):
        first, beside = (100 * after[key][load]["within_share"] for load in ("first", "beside"))
        assert f"{words} {first:.1f} and {beside:.1f} %" in PART
    early = sum(offered - complete for second, offered, complete, *_ in lora["seconds"] if second < 9)
    assert f"{lora['codes']['overloaded']['count']} requests got 429 `overloaded`, {early} of them" in PART
    assert [part["ttft"] + part["tpot"] for part in (*lora["late"], *lora["beside"]["late"])] == [0, 0]
    first = {name: part["share"] for name, part in lora["names"].items()}
    assert f"the worst had {_percent(min(first.values()))}, and the model itself {_percent(first['m'])}" in PART
    shares = [lora["beside"]["names"][name]["share"] for name in ("a5", "a6")]
    page = " ".join((ROOT / "docs" / "evaluation" / "cluster-engines.md").read_text().split())
    assert f"had {100 * shares[0]:.1f} and {100 * shares[1]:.1f} %" in page


def test_step_restart_and_rollout() -> None:
    (ordered_s, *_), step = _at_s("step", "ScaledUp"), RESULTS["step"]
    ready_s = next(
        one["at"] for one in step["changes"] if one["at"] > 0 and sum(pod["ready"] for pod in one["pods"]) == 2
    )
    assert f"a start takes {ready_s - ordered_s:.0f} s from the order" in PART
    assert f"{_all(RESULTS, 'step')['statuses']['429']} requests got 429 meanwhile" in PART
    assert all("cut" not in _all(RESULTS, name)["statuses"] for name in ("step", "restart", "rollout"))


def test_readme_has_kills_and_failures() -> None:
    for name in ("kills", "failures"):
        share, predicted = _all(RESULTS, name)["share"], BY_HAND[name]["within_share"]
        assert f"| {_percent(share)} | {_percent(predicted)} |" in README
    kills = _all(RESULTS, "kills")
    assert f"{_percent(1 - kills['statuses']['200'] / kills['offered'])} of the requests failed" in README


def test_order_follows_the_rise_and_starts_are_learned() -> None:
    step = RESULTS["step"]
    began = datetime.fromtimestamp(step["load_began"], UTC)
    ordered = min(datetime.fromisoformat(one["at"]) for one in step["events"] if one["reason"] == "ScaledUp")
    assert "within 3 s of the rise" in PART
    assert 0.0 < (ordered - began).total_seconds() - scenarios.SCENARIOS["step"].phases[0][1] <= 3.0
    median, late = (step["counters"][f"plimsoll_autoscaler_startup_seconds {share}"] for share in ("0.5", "0.9"))
    assert f"`startupP50` was {median:.0f} s by then, the 90th percentile {late:.0f} s" in PART
