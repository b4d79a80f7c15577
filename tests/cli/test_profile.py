"""The hardware profile that `plimsoll profile` measures: near the engine's law, bounded, and of the named engine."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from plimsoll.api import labels
from plimsoll.cli.cluster import ClusterQueryError
from plimsoll.cli.main import main
from plimsoll.cli.measured_engine import Answer, EngineFacts, connect_pod, connect_url, read_facts
from plimsoll.cli.profile import Limits, benchmark_plan, measure, profile_document
from plimsoll.core.errors import BackendUnavailable, NotFound
from plimsoll.sim import profile
from plimsoll.sim.errors import BadInput
from plimsoll.sim.profile import HardwareProfile
from simulated.api import OpenAiApi
from simulated.exposition import MetricsExposition
from simulated.options import parse_options
from simulated.real_time_driver import RealTimeDriver
from simulated.server import make_core
from tests import builders
from tests.cli.fake_kube import FakeKube, services
from tests.gateway.simulated_engine import simulated_engine
from tests.virtual_time import in_virtual_time

Object = dict[str, Any]

LIMITS = Limits(256, 8192, 720_000, 40_960)
FACTS = EngineFacts("m", 40_960, 720_000, 16)


class VirtualDriver(RealTimeDriver):
    """The simulator's driver on the clock of the loop."""

    def now(self) -> float:
        return self._loop.time()


@dataclass
class Simulator:
    """The engine simulator's application, without network."""

    api: OpenAiApi

    async def send(self, path: str, body: bytes | None = None, timeout_s: float = 60.0) -> Answer:
        status, answer, pending = 0, bytearray(), [{"type": "http.request", "body": body or b"", "more_body": False}]

        async def receive() -> Object:
            return pending.pop() if pending else await asyncio.Future()

        async def collect(message: Object) -> None:
            nonlocal status
            status = message.get("status", status)
            answer.extend(message.get("body", b""))

        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "GET" if body is None else "POST", "path": path, "headers": headers}
        await self.api(scope, receive, collect)
        return Answer(status, bytes(answer))

    async def about(self) -> bytes:
        return b""


def simulator(*flags: str) -> Simulator:
    """An engine simulator on the running loop, whose steps have no noise."""
    options = parse_options(["serve", "m", "--spread", "0", "--noise", "0", "--coalesce-seconds", "0", *flags], {})
    core = make_core(options)
    driver = VirtualDriver(core, options.coalesce_s, options.recompute)
    exposition = MetricsExposition(options, core, 1.0, lambda: driver.deferred)
    return Simulator(OpenAiApi(options, driver, "e", lambda: exposition.text().encode()))


def tpot_s(hardware: HardwareProfile, sequences: int, context: int) -> float:
    """Seconds of a step that only decodes."""
    c = hardware.coefficients
    return c.base + sequences * (c.dec + c.ctx * context)


def ttft_s(hardware: HardwareProfile, prompt: int) -> float:
    """Seconds to the first token of a prompt alone, of one step."""
    c = hardware.coefficients
    step_s = c.base + c.anypre + c.pretok * prompt + c.preattn * prompt**2 / 2
    return hardware.frontend + hardware.frontend_token * prompt + step_s


@pytest.mark.parametrize("name", ["h200-8b-cool", "h100x2-32b", "h200-30b-a3b"])
def test_profile_of_simulator_is_near_its_law(name: str) -> None:
    @in_virtual_time
    async def profiled() -> None:
        engine = simulator("--profile", name)
        facts = await read_facts(engine, "")
        law = profile.load(name)
        limits = replace(LIMITS, kv_tokens=facts.kv_tokens or 0)
        clock = asyncio.get_running_loop().time
        measured = await measure(engine, facts, limits, 2000, 600.0, clock)
        found = profile.parse(profile_document(measured, facts, limits))
        for sequences, context in ((1, 100), (16, 600), (64, 2000), (128, 1000)):
            assert tpot_s(found, sequences, context) == pytest.approx(tpot_s(law, sequences, context), rel=0.1)
        for prompt in (32, 512, 2048, 4096):
            assert ttft_s(found, prompt) == pytest.approx(ttft_s(law, prompt), rel=0.12)
        assert measured.requests <= 2000
        assert (facts.kv_tokens, facts.block_tokens) == (law.kv_tokens // 16 * 16, 16)

    profiled()


@pytest.mark.skipif(importlib.util.find_spec("uvicorn") is None, reason="uvicorn is not installed")
async def test_written_profile_of_a_process_is_taken_by_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = tmp_path / "profile.json"
    async with simulated_engine(tmp_path, "team/chat", "generate", flags=("--time-scale", "0.5")) as address:
        options = ["--requests", "60", "--max-num-seqs", "64", "--max-num-batched-tokens", "8192"]
        status = await asyncio.to_thread(main, ["profile", f"http://{address}", "--output", str(written), *options])
    assert status == 0
    assert "ms per token" in capsys.readouterr().err
    document = json.loads(written.read_text())
    assert (document["max_num_seqs"], document["max_model_len"], document["block_size"]) == (64, 4096, 16)
    assert (await asyncio.to_thread(main, _plan_words(written))) == 0


def _plan_words(path: Path) -> list[str]:
    slo = ["--ttft", "30s", "--tpot", "5s", "--rate", "0.1", "--prompt-tokens", "100", "--output-tokens", "10"]
    return ["plan", "--hardware", str(path), *slo, "--no-simulation"]


@pytest.mark.parametrize(
    ("limits", "most", "batches"),
    [
        (LIMITS, 2000, (1, 4, 8, 16, 32, 64)),
        (LIMITS, 500, (1, 4, 8, 16)),
        (replace(LIMITS, max_sequences=8), 2000, (1, 4, 8)),
        (replace(LIMITS, kv_tokens=1000), 30, (1,)),
    ],
)
def test_plan_stays_within_requests_and_slots(limits: Limits, most: int, batches: tuple[int, ...]) -> None:
    plan = benchmark_plan(limits, most, 60.0)
    assert plan.batches == batches
    assert plan.requests <= most


@pytest.mark.parametrize(
    ("limits", "most", "words"),
    [(LIMITS, 5, "--requests: the smallest measurement needs"), (replace(LIMITS, max_model_len=20), 900, "too short")],
)
def test_plan_that_measures_nothing_is_refused(limits: Limits, most: int, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        benchmark_plan(limits, most, 60.0)


@asynccontextmanager
async def serving(handlers: dict[str, Callable[[web.Request], web.Response]]) -> AsyncIterator[str]:
    """A server on loopback with these answers; its URL."""
    application = web.Application()

    async def handle(request: web.Request) -> web.Response:
        handler = handlers.get(request.path)
        return web.Response(status=404) if handler is None else handler(request)

    application.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def models(_: web.Request) -> web.Response:
    return web.json_response({"data": [{"id": "m", "max_model_len": 4096}]})


@pytest.mark.parametrize(
    "url", ["ftp://a:1", "http://", "http://a:1/v1", "http://a:1?x=1", "http://u:p@a:1", "http://a:99999", "http://a#b"]
)
async def test_url_with_more_than_host_and_port_is_refused(url: str) -> None:
    with pytest.raises(BadInput, match="must be http://HOST:PORT"):
        async with connect_url(url):
            pass


async def test_redirect_to_another_server_is_not_followed() -> None:
    visits = []
    async with serving({"/v1/models": lambda request: visits.append(request) or models(request)}) as other:
        moved = {"/v1/models": lambda _: web.Response(status=307, headers={"location": f"{other}/v1/models"})}
        async with serving(moved) as url, connect_url(url) as connection:
            with pytest.raises(BadInput, match="does not list its models"):
                await read_facts(connection, "")
    assert visits == []


async def test_names_of_engine_are_printable_and_few() -> None:
    names = [{"id": f"\x1b[2J{number}"} for number in range(50_000)]
    async with serving({"/v1/models": lambda _: web.json_response({"data": names})}) as url, connect_url(url) as one:
        with pytest.raises(BadInput) as error:
            await read_facts(one, "m")
    assert str(error.value).endswith("?[2J8, ?[2J9, and 49990 more")
    assert "\x1b" not in str(error.value)


async def test_model_name_without_bound_is_refused() -> None:
    """The name is in the body of each request of a batch."""
    entry = {"id": "m" * 100_000}
    async with serving({"/v1/models": lambda _: web.json_response({"data": [entry]})}) as url, connect_url(url) as one:
        with pytest.raises(BadInput, match="lists no model"):
            await read_facts(one, "")


def test_failed_measurement_leaves_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "profile.json"
    assert main(["profile", "http://127.0.0.1:1", "--output", str(output)]) != 0
    assert "does not answer" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_failed_measurement_keeps_an_earlier_profile(tmp_path: Path) -> None:
    output = tmp_path / "profile.json"
    output.write_text("{}")
    assert main(["profile", "http://127.0.0.1:1", "--output", str(output)]) != 0
    assert [one.read_text() for one in tmp_path.iterdir()] == ["{}"]


def test_folder_that_is_not_there_is_named_before_a_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "http://127.0.0.1:1", "--output", str(tmp_path / "a" / "b.json")]) != 0
    error = capsys.readouterr().err
    assert "a/b.json" in error
    assert "No such file or directory" in error


async def test_busy_engine_is_refused() -> None:
    page = b"vllm:num_requests_running 2\nvllm:num_requests_waiting 1\n"
    async with (
        serving({"/v1/models": models, "/metrics": lambda _: web.Response(body=page)}) as url,
        connect_url(url) as connection,
    ):
        facts = await read_facts(connection, "m")
        with pytest.raises(BadInput, match="the engine has 3 requests: measure one without other clients"):
            await measure(connection, facts, LIMITS, 900, 60.0, lambda: 0.0)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ('{"error": "\x1b[2J"}', r'answered 422: \{"error": "\?\[2J'),
        (web.json_response({"error": "prompt must be a string"}, status=422).text, "answered 422: .*must be a string"),
        ('{"usage": {"completion_tokens": 1}}', "counted 1 output tokens where 2 were requested"),
    ],
)
async def test_engine_without_exact_lengths_is_refused(answer: str, words: str) -> None:
    status = 422 if "error" in answer else 200
    async with (
        serving({"/v1/completions": lambda _: web.Response(status=status, text=answer)}) as url,
        connect_url(url) as connection,
    ):
        with pytest.raises(BadInput, match=words):
            await measure(connection, FACTS, LIMITS, 900, 60.0, lambda: 0.0)


@dataclass
class Scripted:
    """An engine that answers its first requests, and then only as told; each answer takes a second."""

    answers: int
    then: Answer | Exception | None = None
    timeouts: set[float] = field(default_factory=set)

    async def send(self, path: str, body: bytes | None = None, timeout_s: float = 60.0) -> Answer:
        self.timeouts.add(timeout_s)
        await asyncio.sleep(1.0)
        self.answers -= 1
        if self.answers >= 0:
            return Answer(
                200, json.dumps({"usage": {"completion_tokens": json.loads(body or b"")["max_tokens"]}}).encode()
            )
        if isinstance(self.then, Exception):
            raise self.then
        if self.then is None:
            await asyncio.Future()
        assert self.then is not None
        return self.then

    async def about(self) -> bytes:
        return b""


@pytest.mark.parametrize(
    ("answers", "then", "words"),
    [
        (3, None, r"answered too few requests within 100 s: give more --seconds$"),
        (3, ConnectionResetError("reset"), r"answered too few requests, the last with ConnectionResetError: reset$"),
        (3, Answer(503, b"no room\x1b"), r"answered too few requests, the last with status 503: no room\?$"),
        (100_000, None, r"took no longer for 16 tokens than for 1: measure one without other clients$"),
    ],
)
def test_measurement_without_points_names_its_cause(answers: int, then: Answer | Exception | None, words: str) -> None:
    @in_virtual_time
    async def measured() -> None:
        with pytest.raises(BadInput, match=words):
            await measure(Scripted(answers, then), FACTS, LIMITS, 900, 100.0, asyncio.get_running_loop().time)

    measured()


@pytest.mark.parametrize(("seconds", "timeout_s"), [(5.0, 60.0), (600.0, 600.0)])
def test_request_of_a_measurement_may_take_all_seconds(seconds: float, timeout_s: float) -> None:
    engine = Scripted(1)

    @in_virtual_time
    async def measured() -> None:
        with pytest.raises(BadInput, match="give more --seconds"):
            await measure(engine, FACTS, LIMITS, 900, seconds, asyncio.get_running_loop().time)

    measured()
    assert engine.timeouts == {timeout_s}


async def test_missing_limits_and_unknown_models_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    async with serving({"/v1/models": models}) as url:
        assert await asyncio.to_thread(main, ["profile", url]) == 1
        assert "give --max-num-seqs, --max-num-batched-tokens, --kv-tokens" in capsys.readouterr().err
        assert await asyncio.to_thread(main, ["profile", url, "--model", "x"]) == 1
        assert "lists no model x at /v1/models: it has m" in capsys.readouterr().err
        assert await asyncio.to_thread(main, ["profile", url, "--requests", "0"]) == 1
        assert "--requests: 0 must be from 1" in capsys.readouterr().err


def pod(name: str, ready: bool = True, role: str = "serve", **more: str) -> Object:
    metadata = {"name": name, "labels": {labels.SERVICE: "chat", labels.ROLE: role, **more}}
    status = {"conditions": [{"type": "Ready", "status": "True" if ready else "False"}]}
    return {"metadata": metadata, "spec": {"containers": [{"name": "engine"}]}, "status": status}


class PodKube(FakeKube):
    """An API server with pods of a service, and what they answer."""

    def __init__(self, pods: list[Object], documents: dict[tuple[str, int, str], Any], **spec: Any) -> None:
        service = builders.service("chat")
        service["spec"] |= spec
        super().__init__({services("team", "chat"): service, "/api/v1/namespaces/team/pods": {"items": pods}})
        self.documents = documents

    async def request_pod(self, namespace: str, pod: str, port: int, path: str, *_: Any) -> bytes:
        found = self.documents.get((pod, port, path), NotFound("no path", 404))
        if isinstance(found, Exception):
            raise found
        return json.dumps(found).encode()


ABOUT = {
    "version": 1,
    "accelerator": {"name": "NVIDIA H200", "count": 1},
    "limits": {"max_sequences": 128, "kv_tokens": 5000, "token_budget": 2048, "block_tokens": 16},
}


async def test_pod_of_service_states_its_limits() -> None:
    documents = {("b", 8000, "v1/models"): {"data": [{"id": "team/chat"}]}, ("b", 8001, "about"): ABOUT}
    kube = PodKube([pod("a", ready=False), pod("c"), pod("b"), pod("0", role="prefill")], documents)
    connection = await connect_pod(kube, "team", "chat")
    assert (connection.pod, connection.port) == ("b", 8000)
    facts = await read_facts(connection, "")
    assert (facts.model, facts.accelerator, facts.max_sequences, facts.kv_tokens) == (
        "team/chat",
        "NVIDIA H200",
        128,
        5000,
    )
    assert (await connection.send("/absent", b"{}")).status == 404


async def test_pod_that_is_gone_is_an_error() -> None:
    gone = {("b", 8000, "v1/models"): BackendUnavailable("no answer")}
    connection = await connect_pod(PodKube([pod("b")], gone), "team", "chat")
    with pytest.raises(BadInput, match="does not answer GET /v1/models: no answer"):
        await read_facts(connection, "")


@pytest.mark.parametrize(
    ("pods", "spec", "words"),
    [
        ([pod("a", ready=False), pod("p", role="prefill")], {}, "has no ready serve or decode engine"),
        ([pod("a", **{labels.TLS: labels.MUTUAL_TLS})], {}, "require mutual TLS"),
        ([pod("a", **{labels.ENGINE: "openai"})], {}, "is unknown: forward a port"),
        ([], {"targets": {}}, "has targets: forward a port"),
    ],
)
async def test_service_without_engine_to_measure_is_refused(pods: list[Object], spec: Object, words: str) -> None:
    with pytest.raises(ClusterQueryError, match=words):
        await connect_pod(PodKube(pods, {}, **spec), "team", "chat")


HOSTILE = "\x1b]0;owned\x07" + "x" * 100_000


@pytest.mark.parametrize(
    "answer", [HOSTILE, json.dumps({"usage": {"completion_tokens": HOSTILE}}), json.dumps({"data": [{"id": HOSTILE}]})]
)
async def test_words_of_an_engine_are_printable_and_short(answer: str) -> None:
    status = 200 if answer.startswith("{") else 422
    handlers = {
        "/v1/completions": lambda _: web.Response(status=status, text=answer),
        "/v1/models": lambda _: web.Response(text=answer),
    }
    async with serving(handlers) as url, connect_url(url) as connection:
        operation = (
            read_facts(connection, "m") if "data" in answer else measure(connection, FACTS, LIMITS, 900, 60.0, float)
        )
        with pytest.raises(BadInput) as raised:
            await operation
    assert str(raised.value).isprintable()
    assert len(str(raised.value)) < 400


def test_output_that_is_the_config_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.json"
    config.write_text("{}")
    assert main(["profile", "http://127.0.0.1:1", "--config", str(config), "--output", str(config)]) == 1
    assert "is also the file of --config" in capsys.readouterr().err
    assert config.read_text() == "{}"
