"""The gate's runs: what they are called, how they are judged, the cap beside them, and who may read what."""

import argparse
import asyncio
import gzip
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from subprocess import Popen
from typing import Any
from unittest.mock import create_autospec

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from bench.hardware import archive, client, traces
from bench.hardware.admission import compare, local_operator, measure, predict, static_cap
from bench.hardware.admission.runs import (
    CAP_ARM,
    GATE_ARM,
    NO_LIMIT_ARM,
    AdmissionRun,
    RequestOutcome,
    assess_run,
    cap_seconds,
    parse_call,
    results_path,
)
from bench.hardware.admission.static_cap import StaticCap
from bench.hardware.engine import LaunchedEngine
from bench.hardware.measure import MeasurementRecord
from bench.hardware.summary import ObservedRequest
from plimsoll.core.slo import Slo
from tests.gateway.kube_objects import build_catalog

SLO = Slo(0.95, ttft_s=1.0, tpot_s=0.05)
DATA = Path(predict.__file__).parents[1] / "data" / "h100-8b-gate"
LONG_WAIT_S = 3600.0


def test_run_parse_and_format_round_trip() -> None:
    assert AdmissionRun.parse("gate@1.3", 0) == AdmissionRun(GATE_ARM, 1.3, None, 0)
    assert AdmissionRun.parse("cap96@2", 4) == AdmissionRun(CAP_ARM, 2.0, 96, 4)
    assert [AdmissionRun.parse(word, 0).word for word in ("none@1", "cap96@2.6")] == ["none@1", "cap96@2.6"]
    assert AdmissionRun.parse("gate@1.3", 0).trace == AdmissionRun.parse("none@1.3", 5).trace == "run130.csv"
    assert AdmissionRun.parse("cap96@2", 4).result_name("a") == "a04.cap96.200"


@pytest.mark.parametrize("word", ["gate", "cap@2", "cap0@2", "gate@-1", "gates@1", "gate@1,5"])
def test_run_parse_malformed_word_is_rejected(word: str) -> None:
    with pytest.raises(ValueError, match="is none of"):
        AdmissionRun.parse(word, 0)


def test_call_runs_with_admission_must_come_first() -> None:
    assert [run.number for run in parse_call(["gate@1", "gate@2", "none@2"])] == [0, 1, 2]
    with pytest.raises(ValueError, match="come first"):
        parse_call(["gate@1", "none@2", "gate@2"])


def outcome(at_s: float, *, ttft_s: float | None = 0.2, ok: bool = True, refused: bool = False) -> RequestOutcome:
    return RequestOutcome(ObservedRequest(at_s, 10, ttft_s, 0.01 if ok else None, None, ok), refused)


def test_summary_rejected_request_misses_slo_and_is_not_admitted() -> None:
    late, cut, away = outcome(3, ttft_s=1.1), outcome(4, ok=False), outcome(5, ttft_s=None, ok=False, refused=True)
    found = assess_run([outcome(0.5), outcome(2), late, cut, away, outcome(7)], SLO, 1.0, 5.0)
    assert (found["sent"], found["offered_rps"], found["goodput_rps"]) == (4, 0.8, 0.2)
    assert (found["in_promise"], found["shed"], found["unfinished"]) == (0.25, 0.25, 1)
    assert found["admitted_in_promise"] == pytest.approx(1 / 3)


def test_summary_all_rejected_has_no_admitted_attainment() -> None:
    found = assess_run([outcome(2, ttft_s=None, ok=False, refused=True)], SLO, 1.0, 5.0)
    assert (found["in_promise"], found["admitted_in_promise"], found["shed"]) == (0.0, None, 1.0)


def test_cap_wait_is_half_of_remaining_ttft_budget() -> None:
    assert cap_seconds(SLO, 0.2) == pytest.approx(0.4)
    assert cap_seconds(SLO, 1.5) == 0.0


async def entered(own: StaticCap, count: int) -> None:
    while own.inside != count:
        await asyncio.sleep(0.001)


async def test_static_cap_bounds_concurrency_in_arrival_order(tmp_path: Path) -> None:
    own, path = StaticCap(2, lambda prompt: LONG_WAIT_S), tmp_path / "turn"
    async with await own.serve(path):
        slot, two = [await static_cap.acquire_slot(str(path), 5) for _ in range(2)]
        waiting = []
        for _ in range(2):
            waiting.append(asyncio.create_task(static_cap.acquire_slot(str(path), 5)))
            while own.waiting != len(waiting):
                await asyncio.sleep(0.001)
        assert slot is not None
        assert two is not None
        slot.close()
        third = await waiting[0]
        assert third is not None
        assert not waiting[1].done()
        assert own.most == own.inside == 2
        for place in (two, third):
            place.close()
        fourth = await waiting[1]
        assert fourth is not None
        fourth.close()
        await entered(own, 0)


async def test_static_cap_wait_timeout_rejects_and_takes_no_slot(tmp_path: Path) -> None:
    own, path = StaticCap(1, lambda prompt: 0.01 if prompt < 10 else LONG_WAIT_S), tmp_path / "turn"
    async with await own.serve(path):
        inside = await static_cap.acquire_slot(str(path), 100)
        assert inside is not None
        assert await static_cap.acquire_slot(str(path), 1) is None
        inside.close()
        await entered(own, 0)
        after = await static_cap.acquire_slot(str(path), 1)
        assert after is not None
        after.close()


async def test_client_counts_cap_wait_and_reports_rejection(tmp_path: Path) -> None:
    requested: list[int] = []
    own, path = StaticCap(1, lambda prompt: 0.01 if prompt < 10 else LONG_WAIT_S), tmp_path / "turn"

    async def answer(request: web.Request) -> web.Response:
        requested.append(own.inside)
        usage = b'data: {"choices":[],"usage":{"completion_tokens":5}}\n\n'
        return web.Response(body=b'data: {"choices":[{"text":"w"}],"usage":null}\n\n' + usage + b"data: [DONE]\n\n")

    app = web.Application()
    app.router.add_post(client.COMPLETIONS, answer)
    traces.write(tmp_path / "t.csv", [traces.PlannedRequest(0.0, 100, 5)])
    async with await own.serve(path), TestServer(app) as server:
        given = arguments(tmp_path / "t.csv", str(server.make_url("")), path)
        rows = await client.worker(given)
        assert (rows[0]["status"], rows[0]["ok"], requested) == (200, True, [1])
        await entered(own, 0)
        inside = await static_cap.acquire_slot(str(path), 100)
        assert inside is not None
        traces.write(tmp_path / "t.csv", [traces.PlannedRequest(0.0, 5, 5)])
        rows = await client.worker(given)
        assert (rows[0]["status"], rows[0]["ok"], rows[0]["first_s"], requested) == (
            client.REJECTED_STATUS,
            False,
            None,
            [1],
        )
        inside.close()


def arguments(trace: Path, url: str, turn: Path) -> argparse.Namespace:
    """Of one worker that sends all at once."""
    given = {"start": 0.0, "worker": "0/1", "seed": 1, "prefill": "", "remote_from": 0, "drain": LONG_WAIT_S}
    return argparse.Namespace(trace=trace, url=url.rstrip("/"), turnstile=str(turn), model="m", **given)


def test_predict_chooses_three_caps_around_the_best() -> None:
    goods = {64: 1.0, 80: 2.0, 96: 4.0, 112: 3.0, 128: 2.0}
    assert predict.select_caps({cap: {"goodput_rps": good} for cap, good in goods.items()}) == (64, 96, 128)
    assert predict.select_caps({cap: {"goodput_rps": 1.0 / cap} for cap in goods}) == (64, 96, 128)


def test_predict_calls_all_parse() -> None:
    plays = predict.call_plans((64, 96, 128))
    found = {word for words in plays.values() for word in words}
    assert all(parse_call(words) for words in plays.values())
    assert {f"{arm}@{factor:g}" for arm in (GATE_ARM, NO_LIMIT_ARM) for factor in predict.CAPACITY_FACTORS} <= found
    assert {"cap64@2", "cap96@2", "cap128@2"} <= found


def test_predict_simulated_admission_keeps_goodput_in_overload(tmp_path: Path) -> None:
    """Ten seconds at twice the line, after as many at the line: a gate knows nothing before anything has ended."""
    _, plant = predict.predict.from_prior("8b")
    sent = [traces.poisson(rate, 20.0, seed) for rate, seed in ((20.0, 1), (42.0, 2))]
    config = dict(predict.dummy_models.CONFIGS["8b"])
    gated = predict.simulate_admission(plant, config, sent, tmp_path)
    bare = predict.simulated(plant, config, sent[1], "static:1", tmp_path)
    assert [len(run) for run in gated] == [len(run) for run in sent]
    behind, alone = (assess_run(run, SLO, 10.0, 10.0) for run in (gated[1], bare))
    assert behind["goodput_rps"] > 18.0
    assert behind["admitted_in_promise"] is not None
    assert behind["admitted_in_promise"] > 0.95
    assert alone["goodput_rps"] < 2.0
    assert alone["shed"] == 0.0


async def unreachable(address: str, port: int, path: str, tls_name: str = "") -> bytes:
    raise AssertionError(f"{address}:{port}{path} was asked")


def test_operated_objects_are_those_a_gateway_serves(tmp_path: Path) -> None:
    """One engine at the address that is asked, behind the service's name; nothing is told of admission yet."""
    manifest = predict.service_manifest(SLO)
    local_operator.LocalOperator(manifest, tmp_path / "objects.json", 8081, tmp_path / "log", unreachable)
    objects = json.loads((tmp_path / "objects.json").read_text())
    found = build_catalog(objects["inferenceservices"], objects["pods"], objects["inferenceserviceadmissions"])
    service = found.by_name[predict.SERVICE_NAME]
    assert [endpoint.address for endpoint in service.serving_endpoints] == [f"127.0.0.1:{local_operator.API_PORT}"]
    assert service.policy is not None
    assert not service.policy.has_cost_model
    assert service.policy.classes[0].slo == SLO


@pytest.fixture
def prediction_files(tmp_path: Path) -> Callable[..., tuple[Path, Path]]:
    """A prediction of two runs and what was seen of them: half are turned away at the gate, all are late without."""

    def make() -> tuple[Path, Path]:
        said, path = tmp_path / "said", tmp_path / "seen"
        said.mkdir()
        path.mkdir()
        traces.write(said / "run200.csv", [traces.PlannedRequest(float(at), 50, 10) for at in range(8)])
        words = ["gate@2", "cap96@2", "none@2"]
        figures = assess_run([outcome(at) for at in range(8)], SLO, 2.0, 6.0)
        reported = {
            "slo": {"share": 0.95, "ttft_s": 1.0, "ttft_per_1k_tokens_s": 0.0, "tpot_s": 0.05},
            "warm_s": 2.0,
            "window_s": 6.0,
            "traces": {"run200.csv": hashlib.sha256((said / "run200.csv").read_bytes()).hexdigest()},
            "calls": {"a": words},
            "from": {"sheet": {"a": [{"run": word, **figures} for word in words]}},
        }
        (said / "prediction.json").write_text(json.dumps(reported))
        for run, first_s in zip(parse_call(words), (0.2, 0.2, 5.0), strict=True):
            rows = [row(number, first_s, away=run.arm != NO_LIMIT_ARM and number % 2 == 0) for number in range(8)]
            document = {"codes": [0], "requests": rows}
            with gzip.open(path / f"{run.result_name('a')}.requests.json.gz", "wt") as file:
                json.dump(document, file)
        return said, path

    return make


def row(number: int, first_s: float, *, away: bool) -> dict[str, Any]:
    times = {"first_s": None, "last_s": None} if away else {"first_s": first_s, "last_s": first_s + 0.1}
    status = {"status": 429} if away else {}
    given = {"row": number, "at_s": float(number), "late_s": 0.0, "prompt": 50, "output": 10, "gap_s": None}
    return {**given, **times, "ok": not away, **status}


def test_compare_shows_prediction_beside_measurement(
    prediction_files: Callable[..., tuple[Path, Path]], capsys: pytest.CaptureFixture[str]
) -> None:
    said, observed = prediction_files()
    assert compare.main([str(said), str(observed)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "| a | seen | gate@2 | 1.0 | 0.5 | 50.0% | 100.0% | 50.0% | 200 / 200 | 11.1 / 11.1 |"
    assert "goodput behind the gate, by load: 2: 0.5" in lines[lines.index("seen:") + 1]
    assert lines[lines.index("seen:") + 2].endswith("of the best of 1 runs under a cap (cap96@2, 0.5/s): 100.0%")
    assert lines[lines.index("seen:") + 3] == "  in the mean 0.50/s, 100.0% of cap96@2 (0.50/s)"


def test_compare_rejects_changed_trace_and_skips_missing_run(
    prediction_files: Callable[..., tuple[Path, Path]],
) -> None:
    said, observed = prediction_files()
    document = json.loads((said / "prediction.json").read_text())
    path = results_path(observed, parse_call(document["calls"]["a"])[2], "a")
    assert path is not None
    path.unlink()
    assert [row["run"] for row in compare.measured(said, [observed], document)["a"]] == ["gate@2", "cap96@2"]
    (said / "run200.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,1,1\n")
    with pytest.raises(ValueError, match="not the trace"):
        compare.measured(said, [observed], document)


def test_archive_keeps_rejected_requests(tmp_path: Path) -> None:
    path, kept = tmp_path / "seen", tmp_path / "kept"
    path.mkdir()
    whole = {**row(0, 0.2, away=False), "status": 200, "tokens": 10}
    document = {"codes": [0], "requests": [whole, {**row(1, 0.2, away=True), "error": "busy"}]}
    (path / "a00.gate.200.requests.json").write_text(json.dumps(document))
    (path / "a.operator.jsonl").write_text('{"admission": null}\n')
    for name in ("gpu.csv", "clock.json", "result.json"):
        (path / name).write_text("{}\n")
    archive.main([str(path), str(kept)])
    rows = archive.read_complete(kept / "a00.gate.200.requests.json.gz")
    assert [row.get("status") for row in rows] == [None, 429]
    assert [row.rejected for row in compare.outcomes(rows)] == [False, True]
    assert gzip.decompress((kept / "a.operator.jsonl.gz").read_bytes()) == b'{"admission": null}\n'


def test_stored_prediction_matches_stored_traces() -> None:
    document = json.loads((DATA / "prediction.json").read_text())
    for name, digest in document["traces"].items():
        assert hashlib.sha256((DATA / name).read_bytes()).hexdigest() == digest
    runs = {run.trace for words in document["calls"].values() for run in parse_call(words)}
    assert runs == document["traces"].keys()
    for calls in document["from"].values():
        assert {name: [row["run"] for row in figures] for name, figures in calls.items()} == document["calls"]


def test_drain_is_shortened_only_for_overload_without_admission() -> None:
    kept = [
        word
        for word in ("gate@2.6", "cap96@2", "none@1.3")
        if measure.drain_s(AdmissionRun.parse(word, 0)) < client.CLIENT_DRAIN_S
    ]
    assert not kept
    assert measure.drain_s(AdmissionRun.parse("none@2", 0)) < client.CLIENT_DRAIN_S


def test_capped_run_reaches_the_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clients = create_autospec(client.run, return_value=[{"status": 200, "ok": True, "late_s": 0.001}])
    monkeypatch.setattr(client, "run", clients)
    monkeypatch.setattr(measure, "wait_idle", lambda _: None)
    monkeypatch.setattr(measure, "_DRAIN_MARGIN_S", 0.0)
    record = MeasurementRecord(tmp_path / "result.json")
    given = argparse.Namespace(call="a", prediction=tmp_path, workers=1)
    engine_run = LaunchedEngine("e", create_autospec(Popen, instance=True), 8000, 8001, 0.0)
    run = AdmissionRun.parse("none@1", 0)
    asyncio.run(measure._play_run(record, engine_run, given, tmp_path, run, {}, None))
    assert clients.call_args.kwargs["cap_socket"] == ""
    assert record.found[run.result_name("a")]["ok"] == 1
