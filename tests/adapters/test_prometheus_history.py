"""The past, and engines by now, as a Prometheus tells them: whole, in gaps, wrong, or not at all."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer, unused_port
from prometheus_client.parser import text_string_to_metric_families

from plimsoll.adapters import engine_metrics
from plimsoll.adapters.prometheus_history import QUERY_STEP_S, PrometheusHistory
from plimsoll.core.errors import BackendUnavailable
from plimsoll.core.ports import EngineReading
from plimsoll.engines import launched
from tests.adapters.test_scrape import PAGE

DAY_S = 86400.0
END_S = 20_000 * DAY_S
Answer = Callable[[float, float], Any]


class RangeQueryServer:
    """A Prometheus that answers as `answer` says, and notes what it was asked."""

    def __init__(self) -> None:
        self.answer: Answer = minutes
        self.requested: list[dict[str, str]] = []
        self.hang = asyncio.Event()
        self.url = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.requested.append(dict(request.query))
        found = self.answer(float(request.query["start"]), float(request.query["end"]))
        if found is None:
            await self.hang.wait()
        return found if isinstance(found, web.Response) else web.json_response(found)

    async def rate(self, days: float = 1.0, timeout_s: float = 5.0) -> Sequence[tuple[float, float]]:
        past = PrometheusHistory(self.url, timeout_s)
        return await asyncio.to_thread(past.request_rate, "team/chat", END_S - days * DAY_S, END_S)


def serving(path: str, handle: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> TestServer:
    """A server that answers there."""
    app = web.Application()
    app.router.add_get(path, handle)
    return TestServer(app)


@pytest.fixture
async def store() -> AsyncIterator[RangeQueryServer]:
    found = RangeQueryServer()
    async with serving("/prefix/api/v1/query_range", found.handle) as server:
        found.url = str(server.make_url("/prefix/"))
        yield found
        found.hang.set()


def matrix(*values: Any) -> Any:
    result = [{"metric": {}, "values": list(values)}]
    return {"status": "success", "data": {"resultType": "matrix", "result": result}}


def minutes(start_s: float, end_s: float) -> Any:
    steps = range(int((end_s - start_s) // QUERY_STEP_S) + 1)
    return matrix(*([start_s + QUERY_STEP_S * n, str(0.5 * n)] for n in steps))


async def test_request_rate_two_weeks_is_queried_by_week_and_joined(store: RangeQueryServer) -> None:
    found = await store.rate(days=14.0)
    times = [at_s for at_s, _ in found]
    assert times == sorted(set(times))
    assert (times[0], times[-1]) == (END_S - 14 * DAY_S, END_S)
    assert len(times) == 14 * 1440 + 1
    assert all((float(q["end"]) - float(q["start"])) / float(q["step"]) < 11_000 for q in store.requested)
    assert all('demand_requests_total{service="team/chat"}' in q["query"] for q in store.requested)


async def test_request_rate_unknown_service_is_empty(store: RangeQueryServer) -> None:
    store.answer = lambda start_s, end_s: {"status": "success", "data": {"resultType": "matrix", "result": []}}
    assert list(await store.rate()) == []


async def test_request_rate_invalid_samples_are_dropped(store: RangeQueryServer) -> None:
    good = END_S - 600.0
    store.answer = lambda start_s, end_s: matrix(
        [good, "2.5"], [good + 60, "NaN"], [good + 120, "+Inf"], [good + 180, "-1"], [good + 60, "1e300"], [good, "3"],
        [END_S + 1e6, "1"], ["soon", "1"], [good + 240], None, [good + 300, "0"],
    )  # fmt: skip
    assert list(await store.rate()) == [(good, 2.5), (good + 300, 0.0)]


@pytest.mark.parametrize(
    "said",
    [
        web.Response(status=503, text="away for lunch"),
        web.Response(status=400, text='{"status": "error", "error": "parse error"}'),
        web.Response(text="<html>a login page</html>"),
        web.Response(text="[]", content_type="application/json"),
        web.Response(text='{"status": "success", "data": {"result": [{}]}}', content_type="application/json"),
        web.Response(text='{"status": "success", "data": {"result": {"a": 1}}}', content_type="application/json"),
    ],
    ids=["away", "refused", "not json", "another thing", "no values", "no list"],
)
async def test_request_rate_bad_response_raises_with_url(store: RangeQueryServer, said: web.Response) -> None:
    store.answer = lambda start_s, end_s: said
    with pytest.raises(BackendUnavailable, match=r"Prometheus at http://127\.0\.0\.1.*/prefix: ."):
        await store.rate()
    assert len(store.requested) == 1, "asked again"


async def test_request_rate_timeout_raises(store: RangeQueryServer) -> None:
    store.answer = lambda start_s, end_s: None
    with pytest.raises(BackendUnavailable, match="timed out"):
        await store.rate(timeout_s=0.05)


async def test_request_rate_connection_refused_raises(store: RangeQueryServer) -> None:
    store.url = f"http://127.0.0.1:{unused_port()}"
    with pytest.raises(BackendUnavailable, match="refused"):
        await store.rate()


# ---------------------------------------------------------------- engines by now

SCRAPED_S = 1_795_000_000.5


def scraped(page: str, pod: str, at_s: float, **target: str) -> list[Any]:
    """What Prometheus makes of a page: every sample with the labels of its target, after an older one of it."""
    mine = {"namespace": "team", "pod": pod, "job": "engines", "instance": f"{pod}:8001", **target}
    return [
        {
            "metric": {"__name__": sample.name, **sample.labels, **mine},
            "values": [[at_s - 5.0, "0"], [at_s, str(sample.value)]],
        }
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    ]


class InstantQueryServer:
    """A Prometheus that answers instant queries."""

    def __init__(self) -> None:
        self.series: Any = []
        self.requested: list[str] = []
        self.status = 200
        self.url = ""

    async def handle(self, request: web.Request) -> web.Response:
        self.requested.append(request.query["query"])
        data = {"status": "success", "data": {"resultType": "matrix", "result": self.series}}
        return web.json_response(data, status=self.status)

    async def engines(self, *pods: str) -> dict[str, EngineReading]:
        names = dict.fromkeys(pods, launched.METRICS)
        found = await asyncio.to_thread(PrometheusHistory(self.url).engine_readings, "team", names)
        return {reading.pod: reading for reading in found}


@pytest.fixture
async def now() -> AsyncIterator[InstantQueryServer]:
    found = InstantQueryServer()
    async with serving("/api/v1/query", found.handle) as server:
        found.url = str(server.make_url(""))
        yield found


async def test_engine_readings_scraped_reading_equals_direct_reading(now: InstantQueryServer) -> None:
    """Figures, histograms and the process's start, whichever way they came."""
    now.series = scraped(PAGE, "a", SCRAPED_S)
    assert await now.engines("a") == {
        "a": engine_metrics.parse_metrics(PAGE.encode(), "a", SCRAPED_S, launched.METRICS)
    }
    assert re.fullmatch(r'\{namespace="team",pod=~"a",__name__=~"[a-z:_|]+"\}\[30s\]', now.requested[0])


async def test_engine_readings_scraped_by_two_jobs_uses_latest(now: InstantQueryServer) -> None:
    page = 'vllm:num_requests_running{engine="0"} 3\nvllm:num_requests_running{engine="1"} 1\n'
    now.series = scraped(page, "a", SCRAPED_S) + scraped(page, "a", SCRAPED_S + 2.0, job="annotated")
    found = (await now.engines("a"))["a"]
    assert (found.running, found.at_s) == (4.0, SCRAPED_S + 2.0)


async def test_engine_readings_ignore_series_missing_in_last_scrape(now: InstantQueryServer) -> None:
    now.series = [
        *scraped('vllm:num_requests_running{engine="0"} 3\n', "a", SCRAPED_S),
        *scraped('vllm:num_requests_running{engine="1"} 9\n', "a", SCRAPED_S - 5.0),
    ]
    assert (await now.engines("a"))["a"].running == 3.0


async def test_engine_readings_drop_invalid_samples_and_empty_engines(now: InstantQueryServer) -> None:
    good = scraped("vllm:num_requests_running 3\n", "a", SCRAPED_S)
    other = scraped("up 1\n", "b", SCRAPED_S)
    now.series = [
        *good,
        *other,
        None,
        {},
        {"metric": {"pod": "a"}},
        {"metric": {"__name__": "x"}, "values": [[1, "2"]]},
    ]
    now.series += [
        {"metric": {**good[0]["metric"], "engine": "1"}, "values": values} for values in ([], [["soon", "1"]])
    ]
    assert {pod: found.running for pod, found in (await now.engines("a", "b", "c")).items()} == {"a": 3.0}


async def test_engine_readings_many_pods_are_split_to_fit_url(now: InstantQueryServer) -> None:
    pods = [f"some-service-with-a-long-name-serve-{n:010d}-abcde" for n in range(100)]
    await now.engines(*pods)
    assert len(now.requested) == 3
    assert max(map(len, now.requested)) < 4000
    assert [pod for pod in pods if not any(pod in query for query in now.requested)] == []


async def test_engine_readings_error_status_raises_unavailable(now: InstantQueryServer) -> None:
    now.status = 503
    with pytest.raises(BackendUnavailable, match=r"Prometheus at http://127\.0\.0\.1:\d+: HTTP Status Code 503"):
        await now.engines("a")
