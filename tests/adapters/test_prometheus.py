"""The past as a Prometheus tells it: whole, in gaps, wrong, or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer, unused_port

from plimsoll.adapters.prometheus import STEP_S, Prometheus
from plimsoll.core.errors import Unavailable

DAY_S = 86400.0
END_S = 20_000 * DAY_S
Answer = Callable[[float, float], Any]


class Store:
    """A Prometheus that answers as `answer` says, and notes what it was asked."""

    def __init__(self) -> None:
        self.answer: Answer = minutes
        self.asked: list[dict[str, str]] = []
        self.hang = asyncio.Event()
        self.url = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(dict(request.query))
        found = self.answer(float(request.query["start"]), float(request.query["end"]))
        if found is None:
            await self.hang.wait()
        return found if isinstance(found, web.Response) else web.json_response(found)

    async def rate(self, days: float = 1.0, timeout_s: float = 5.0) -> Sequence[tuple[float, float]]:
        past = Prometheus(self.url, timeout_s)
        return await asyncio.to_thread(past.request_rate, "team/chat", END_S - days * DAY_S, END_S)


@pytest.fixture
async def store() -> AsyncIterator[Store]:
    found = Store()
    app = web.Application()
    app.router.add_get("/prefix/api/v1/query_range", found.handle)
    async with TestServer(app) as server:
        found.url = str(server.make_url("/prefix/"))
        yield found
        found.hang.set()


def matrix(*values: Any) -> Any:
    result = [{"metric": {}, "values": list(values)}]
    return {"status": "success", "data": {"resultType": "matrix", "result": result}}


def minutes(start_s: float, end_s: float) -> Any:
    steps = range(int((end_s - start_s) // STEP_S) + 1)
    return matrix(*([start_s + STEP_S * n, str(0.5 * n)] for n in steps))


async def test_two_weeks_are_asked_for_week_by_week_and_come_as_one(store: Store) -> None:
    found = await store.rate(days=14.0)
    times = [at_s for at_s, _ in found]
    assert times == sorted(set(times))
    assert (times[0], times[-1]) == (END_S - 14 * DAY_S, END_S)
    assert len(times) == 14 * 1440 + 1
    assert all((float(q["end"]) - float(q["start"])) / float(q["step"]) < 11_000 for q in store.asked)
    assert all('service="team/chat",attempt="first"' in q["query"] for q in store.asked)


async def test_a_service_that_it_never_saw_has_no_past(store: Store) -> None:
    store.answer = lambda start_s, end_s: {"status": "success", "data": {"resultType": "matrix", "result": []}}
    assert list(await store.rate()) == []


async def test_samples_that_cannot_be_are_left_out(store: Store) -> None:
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
async def test_whatever_else_it_says_is_one_error_that_names_it(store: Store, said: web.Response) -> None:
    store.answer = lambda start_s, end_s: said
    with pytest.raises(Unavailable, match=r"Prometheus at http://127\.0\.0\.1.*/prefix: ."):
        await store.rate()
    assert len(store.asked) == 1, "asked again"


async def test_one_that_does_not_answer_is_given_up(store: Store) -> None:
    store.answer = lambda start_s, end_s: None
    with pytest.raises(Unavailable, match="timed out"):
        await store.rate(timeout_s=0.05)


async def test_one_that_is_not_there(store: Store) -> None:
    store.url = f"http://127.0.0.1:{unused_port()}"
    with pytest.raises(Unavailable, match="refused"):
        await store.rate()
