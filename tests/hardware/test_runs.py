"""Traces drawn before a run, clients that count honestly, and a comparison that wants the trace it predicted."""

import asyncio
import hashlib
import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from bench.hardware import archive, client, compare, engine, itl_histogram, traces
from bench.hardware.measure_pd import PairRun
from bench.hardware.summary import ObservedRequest, summary, within_slo
from plimsoll.core.slo import Slo

SLO = Slo(0.95, ttft_s=0.5, tpot_s=0.05)
TOKEN = b'data: {"choices":[{"text":"w"}],"usage":null}\n\n'
DONE = b"data: [DONE]\n\n"


def usage(tokens: int) -> bytes:
    return b'data: {"choices":[],"usage":{"completion_tokens":%d}}\n\n' % tokens


def plugin() -> ModuleType:
    """The step log's module, which is no part of a package."""
    path = Path(engine.__file__).parent / "steplog" / "steplog.py"
    spec = importlib.util.spec_from_file_location("steplog", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["steplog"] = module
    spec.loader.exec_module(module)
    return module


def test_poisson_trace_is_seeded_and_has_its_rate(tmp_path: Path) -> None:
    one, two = traces.poisson(20, 30, 7), traces.poisson(20, 30, 7)
    assert one == two
    assert one != traces.poisson(20, 30, 8)
    assert len(one) == 600
    assert [r.at_s for r in one] == sorted(r.at_s for r in one)
    assert 0 <= one[0].at_s < one[-1].at_s < 30
    traces.write(tmp_path / "t.csv", one)
    assert traces.read(tmp_path / "t.csv") == one


@pytest.mark.parametrize(("rate", "seconds"), [(0, 10), (5, 0), (-1, 10)])
def test_poisson_trace_of_nothing_is_rejected(rate: float, seconds: float) -> None:
    with pytest.raises(ValueError, match="above 0"):
        traces.poisson(rate, seconds, 1)


@pytest.mark.parametrize(
    ("one", "met"),
    [
        (ObservedRequest(0, 10, 0.5, 0.05, None, True), True),
        (ObservedRequest(0, 10, 0.51, 0.01, None, True), False),
        (ObservedRequest(0, 10, 0.1, 0.051, None, True), False),
        (ObservedRequest(0, 1, 0.1, None, None, True), True),
        (ObservedRequest(0, 10, 0.1, None, None, True), False),
        (ObservedRequest(0, 10, None, None, None, False), False),
        (ObservedRequest(0, 10, 0.1, 0.01, None, False), False),
    ],
)
def test_meets_slo_requires_all_targets_and_completion(one: ObservedRequest, met: bool) -> None:
    assert within_slo(one, SLO) is met


def test_summary_counts_every_sent_request() -> None:
    observed = [ObservedRequest(0, 10, 0.1, 0.01, None, True), ObservedRequest(1, 10, None, None, None, False)]
    found = summary(observed, SLO, 2.0)
    assert (found["in_promise"], found["rate_rps"], found["goodput_rps"]) == (0.5, 1.0, 0.5)
    assert summary([], SLO, 2.0)["in_promise"] is None


async def answered(serve: Callable[[web.Request], Any]) -> dict[str, Any]:
    application = web.Application()
    application.router.add_post(client.COMPLETIONS, serve)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        async with client.session() as http:
            return await client.send_streamed(
                http, f"http://127.0.0.1:{port}", client.request_body([5, 6], 2, stream=True)
            )
    finally:
        await runner.cleanup()


async def test_streamed_complete_response_is_ok() -> None:
    async def serve(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        for part in (TOKEN, TOKEN, usage(2), DONE):
            await answer.write(part)
            await asyncio.sleep(0.02)
        return answer

    observed = await answered(serve)
    assert observed["ok"]
    assert 0 < observed["first_s"] < observed["last_s"]
    assert observed["gap_s"] == pytest.approx(observed["last_s"] - observed["first_s"])
    assert observed["gaps_s"] == [pytest.approx(observed["gap_s"], abs=1e-5)]


@pytest.mark.parametrize("parts", [(TOKEN, usage(1), DONE), (TOKEN, TOKEN, usage(2)), (DONE,), ()])
async def test_streamed_truncated_response_is_not_ok(parts: tuple[bytes, ...]) -> None:
    async def serve(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        for part in parts:
            await answer.write(part)
        return answer

    assert not (await answered(serve))["ok"]


async def test_streamed_rejection_keeps_status_and_headers() -> None:
    async def serve(request: web.Request) -> web.Response:
        return web.Response(status=503, text="draining", headers={"x-plimsoll-retry": "1"})

    observed = await answered(serve)
    assert (observed["status"], observed["ok"], observed["headers"]) == (503, False, {"x-plimsoll-retry": "1"})


@pytest.mark.parametrize(("idle_s", "connections"), [(0.01, 2), (600.0, 1)])
async def test_client_session_does_not_reuse_old_connections(
    idle_s: float, connections: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM closes one that was idle: a request on it would be lost, and with it all that was measured."""
    visited = set()

    async def serve(request: web.Request) -> web.Response:
        visited.add(request.transport)
        return web.Response(status=503)

    monkeypatch.setattr(client, "IDLE_S", idle_s)
    application = web.Application()
    application.router.add_post(client.COMPLETIONS, serve)
    async with TestServer(application) as server, client.session() as http:
        for _ in range(2):
            await client.send_streamed(
                http, str(server.make_url("")).rstrip("/"), client.request_body([5], 2, stream=True)
            )
            await asyncio.sleep(0.1)
    assert len(visited) == connections


async def test_streamed_connection_failure_is_recorded() -> None:
    async with client.session() as http:
        observed = await client.send_streamed(http, "http://127.0.0.1:1", client.request_body([5], 2, stream=True))
    assert not observed["ok"]
    assert "Connect" in observed["error"]


def test_compare_trace_changed_after_prediction_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "run0.csv"
    traces.write(path, traces.poisson(2, 10, 1))
    reported: dict[str, Any] = {
        "slo": asdict(SLO),
        "traces": {"run0.csv": hashlib.sha256(path.read_bytes()).hexdigest()},
    }
    reported |= {"warm_s": 0.0, "window_s": 10.0}
    (tmp_path / "prediction.json").write_text(json.dumps(reported))
    row = {"at_s": 1.0, "late_s": 0.1, "output": 3, "first_s": 0.2, "last_s": 0.3, "gap_s": 0.05, "ok": True}
    observed_path = tmp_path / "run0.requests.json"
    rows = [row | {"row": number} for number in range(20)]
    observed_path.write_text(json.dumps({"codes": [0, 0], "requests": rows}))
    found = compare.measured(tmp_path, tmp_path)
    assert found[0]["ttft_s"]["p50"] == pytest.approx(0.3), "a request that was sent late waited for its client"
    assert found[0]["tpot_s"]["p50"] == pytest.approx(0.05)
    for codes, lost in (([0, 0], rows[:-1]), ([0, 0], rows[::2]), ([0, -9], rows)):
        observed_path.write_text(json.dumps({"codes": codes, "requests": lost}))
        with pytest.raises(ValueError, match=r"run0.requests.json: \d+ of 20 requests"):
            compare.measured(tmp_path, tmp_path)
    traces.write(path, traces.poisson(2, 10, 2))
    with pytest.raises(ValueError, match="not the trace"):
        compare.measured(tmp_path, tmp_path)


def test_itl_counts_are_per_second_of_stream_start() -> None:
    early = {"at_s": 0.5, "gaps_s": [1.0] * 50}
    late = [{"at_s": 4.0 + number / 10, "gaps_s": [0.006] * 98 + [0.04, 0.0]} for number in range(3)]
    counts = json.loads(json.dumps(itl_histogram.count_itl([early, *late])))
    assert itl_histogram.quantile_s(counts, 0.5, 4, 44) == pytest.approx(0.006, rel=0.01)
    assert itl_histogram.quantile_s(counts, 0.995, 4, 44) == pytest.approx(0.04, rel=0.01)
    assert itl_histogram.quantile_s(counts, 0.9, 0, 1) == pytest.approx(1.0, rel=0.01)
    assert itl_histogram.quantile_s(counts, 0.5, 5, 44) is None


@pytest.mark.parametrize(
    ("word", "name", "budget", "remote_from"),
    [
        ("agg:a/b.csv", "02.agg.b", 8192, 0),
        ("agg:b.csv:1024", "02.agg.b.1024", 1024, 0),
        ("pd:b.csv", "02.pd.b", 8192, 0),
        ("pd:b.csv:900", "02.pd.b.900", 8192, 900),
    ],
)
def test_load_parse_sets_engines_budget_and_prefill_threshold(
    word: str, name: str, budget: int, remote_from: int
) -> None:
    load = PairRun.parse(2, word)
    assert (load.name, load.budget, load.remote_from) == (name, budget, remote_from)


def test_run_with_lost_client_is_rejected(tmp_path: Path) -> None:
    """Its rows would be missing, and with them its misses; what the others saw is on disk."""
    trace, out = tmp_path / "t.csv", tmp_path / "t.requests.json"
    traces.write(trace, [traces.PlannedRequest(0.0, 5, 2)])
    with pytest.raises(ValueError, match="0 of 1 requests, clients ended with"):
        client.run(trace, "http://127.0.0.1:1", out, workers=1, seed=-1)  # no generator takes that
    assert json.loads(out.read_text())["requests"] == []


@pytest.mark.parametrize(("rows", "codes"), [((0, 1, 3), [0]), ((0, 1, 2), [0, 1]), ((0, 0, 1), [0])])
def test_archive_incomplete_rows_are_rejected(rows: tuple[int, ...], codes: list[int]) -> None:
    archive.check_complete("x", [{"row": number} for number in range(3)], [0, 0])
    with pytest.raises(ValueError, match="x: 3 requests"):
        archive.check_complete("x", [{"row": number} for number in rows], codes)


def test_step_log_counts_chunks_and_contexts_like_the_model() -> None:
    output = SimpleNamespace(
        num_scheduled_tokens={"new": 100, "chunk": 50, "old": 1, "resumed": 300},
        scheduled_new_reqs=[SimpleNamespace(req_id="new", num_computed_tokens=20)],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=["chunk", "old", "resumed"], num_computed_tokens=[60, 500, 0], num_output_tokens=[0, 7, 3]
        ),
    )
    chunks, tokens, pairs, sequences, context = plugin().step_counts(output)
    assert (chunks, tokens, sequences, context) == (3, 450, 1, 500)
    assert pairs == 100 * (20 + 50) + 50 * (60 + 25) + 300 * 150
