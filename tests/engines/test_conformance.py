"""The conformance suite says what a server has: the engine simulator, llama.cpp's server, and servers with gaps."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import itertools
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from plimsoll.engines import conformance
from plimsoll.engines.conformance import MISSING, NOTE, OK, Result, Server
from plimsoll.engines.engine import Launch
from plimsoll.engines.registry import ENGINES
from tests.gateway.simulated_engine import simulated_engine
from tests.ports import free_ports

REQUIRED = ["health", "models", "chat", "model-name", "stream", "cancel", "metrics"]
ROOT = Path(__file__).parents[2]
HAS_LLAMA_CPP = all(importlib.util.find_spec(name) for name in ("xllamacpp", "gguf"))


def outcomes(results: list[Result]) -> dict[str, str]:
    return {result.check: result.outcome for result in results}


def detail(results: list[Result], check: str) -> str:
    return next(result.detail for result in results if result.check == check)


@pytest.mark.skipif(importlib.util.find_spec("uvicorn") is None, reason="uvicorn is not installed")
async def test_engine_simulator_has_all(tmp_path: Path) -> None:
    async with simulated_engine(tmp_path, "team/chat", "generate") as address:
        results = await asyncio.to_thread(conformance.run, Server(f"http://{address}"))
    assert [outcomes(results).get(check) for check in REQUIRED] == [OK] * len(REQUIRED), results
    assert detail(results, "metrics").startswith("vLLM: has running, waiting, kv_used, steps, ")
    assert "refused with 404" in detail(results, "model-name")
    assert "is gone after" in detail(results, "cancel")


@pytest.fixture
def llama_cpp(tmp_path: Path) -> Iterator[Server]:
    """llama.cpp's server with the adapter's arguments and some of a user; its parser refuses those it does not have."""
    (port,) = free_ports(1)
    model = str(tmp_path / "tiny.gguf")
    own = ENGINES["llama-cpp"].own_args(Launch(model, False, "chat", "generate", 0, port))
    users = ["--parallel", "2", "--ctx-size", "4096", "--threads", "1", "--host", "127.0.0.1"]
    command = [sys.executable, "-m", "tests.engines.tiny_gguf", model, *own, *users]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            assert process.stdout is not None
            lines = list(itertools.takewhile(lambda line: "serving on" not in line, process.stdout))
            assert process.poll() is None, "".join(lines[-20:])
            threading.Thread(target=process.stdout.read, daemon=True).start()
            yield Server(f"http://127.0.0.1:{port}")
        finally:
            process.kill()


@pytest.mark.skipif(not HAS_LLAMA_CPP, reason="xllamacpp and gguf are not installed")
def test_llama_cpp_with_the_adapters_arguments_has_all(llama_cpp: Server) -> None:
    results = conformance.run(llama_cpp)
    print(*(result.line() for result in results), sep="\n")
    assert [outcomes(results).get(check) for check in REQUIRED] == [OK] * len(REQUIRED), results
    assert detail(results, "metrics").startswith("llama.cpp: has running, waiting, steps, ")
    assert detail(results, "metrics").endswith("lacks kv_used")
    assert outcomes(results)["embeddings"] == NOTE


class Partial(BaseHTTPRequestHandler):
    """A server with the gaps that its class attribute names."""

    gaps: frozenset[str] = frozenset()
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        """No log."""

    def do_GET(self) -> None:
        """Health, models and metrics."""
        if self.path == "/health":
            self._send(503 if "health" in self.gaps else 200, b"{}")
        elif self.path == "/v1/models":
            self._send(200, json.dumps({"data": [] if "models" in self.gaps else [{"id": "m"}]}).encode())
        elif self.path == "/metrics" and "metrics" not in self.gaps:
            busy = 1 if "cancel" in self.gaps else 0
            self._send(200, f'other_metric 1\nvllm:num_requests_running{{engine="0"}} {busy}\n'.encode())
        else:
            self._send(404, b"not here")

    def do_POST(self) -> None:
        """Chats, streamed or not."""
        document = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path != "/v1/chat/completions":
            self._send(404, b"not here")
        elif document["model"] != "m":
            self._send(500 if "model-name" in self.gaps else 404, b"no such model")
        elif document.get("stream"):
            self._stream()
        else:
            usage = {} if "usage" in self.gaps else {"prompt_tokens": 3, "completion_tokens": 2}
            choice = {"message": {"content": "a"}, "finish_reason": "stop"}
            self._send(200, json.dumps({"choices": [choice], "usage": usage}).encode())

    def _stream(self) -> None:
        events: list[dict[str, Any]] = [{"choices": [{"delta": {"content": "a"}}]}]
        if "stream-usage" not in self.gaps:
            events.append({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 1}})
        text = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
        self._send(200, (text if "done" in self.gaps else f"{text}data: [DONE]\n\n").encode(), "text/event-stream")

    def _send(self, status: int, body: bytes, kind: str = "application/json") -> None:
        with contextlib.suppress(OSError):  # a client that left
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)


@contextlib.contextmanager
def partial(*gaps: str) -> Iterator[Server]:
    handler = type("Handler", (Partial,), {"gaps": frozenset(gaps)})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield Server(f"http://127.0.0.1:{server.server_port}")
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("gap", "check", "outcome", "words"),
    [
        ("nothing", "stream", OK, "1 events for 1 output tokens"),
        ("health", "health", MISSING, "GET /health answered 503, not 200"),
        ("models", "models", MISSING, "lists no model"),
        ("usage", "chat", MISSING, "no usage with prompt_tokens and completion_tokens"),
        ("model-name", "model-name", MISSING, "another model name is answered with 500"),
        ("stream-usage", "stream", MISSING, "no event has usage"),
        ("done", "stream", MISSING, "does not end with [DONE]"),
        ("metrics", "metrics", NOTE, "GET /metrics answered 404: the load of engines is unknown"),
        ("metrics", "cancel", OK, "no metric says whether the cancelled one runs on"),
        ("nothing", "tokenize", NOTE, "POST /tokenize answered 404"),
    ],
)
def test_gap_of_a_server_is_named(gap: str, check: str, outcome: str, words: str) -> None:
    with partial(gap) as server:
        results = conformance.run(server)
    assert outcomes(results)[check] == outcome
    assert words in detail(results, check)
    others = {name for name, found in outcomes(results).items() if found == MISSING and name != check}
    assert others == set()


def test_cancelled_request_that_runs_on_is_missing() -> None:
    with partial("cancel") as server:
        server.idle_wait_s = 0.5
        results = conformance.run(server)
    assert outcomes(results)["cancel"] == MISSING
    assert "still runs after" in detail(results, "cancel")


class Endless(BaseHTTPRequestHandler):
    """A server whose responses have no end."""

    def log_message(self, *args: Any) -> None:
        """No log."""

    def do_GET(self) -> None:
        """The health check and the list of models."""
        self._send("application/json", b" ")

    def do_POST(self) -> None:
        """A stream."""
        self._send("text/event-stream", b"data: {}\n\n")

    def _send(self, kind: str, piece: bytes) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.end_headers()
        with contextlib.suppress(OSError):  # the client leaves
            while True:
                self.wfile.write(piece)


def test_responses_without_an_end_are_cut() -> None:
    """A minute passes between two readings of the clock."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Endless) as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        server = Server(f"http://127.0.0.1:{made.server_port}", "m", clock=itertools.count(0.0, 60.0).__next__)
        with pytest.raises(conformance.CheckFailed, match=r"GET /v1/models had no end within 30\.0 s"):
            conformance.check_models(server)
        with pytest.raises(conformance.CheckFailed, match=r"the stream had no end within 30\.0 s"):
            conformance.check_stream(server)
        made.shutdown()


def test_request_that_ended_by_itself_is_not_called_cancelled() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Partial) as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        server = Server(f"http://127.0.0.1:{made.server_port}", "m")
        words = conformance.check_cancel(server, ENGINES["vllm"].metrics)
        made.shutdown()
    assert "had ended, or was not counted yet" in words


@pytest.mark.parametrize(("gaps", "outcome"), [((), OK), (("done",), NOTE)])
def test_running_request_at_the_end_of_a_server(gaps: tuple[str, ...], outcome: str) -> None:
    stops = []
    with partial(*gaps) as server:
        server.model = "m"
        result = conformance.check_drain(server, lambda: stops.append(1))
    assert (result.outcome, stops) == (outcome, [1])


def test_process_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    with partial() as server:
        assert conformance.main([server.url, "--pid", str(process.pid)]) == 0
    assert "No such process: a request that runs at SIGTERM may be cut" in capsys.readouterr().out


def test_without_server_first_checks_fail_and_end() -> None:
    results = conformance.run(Server(f"http://127.0.0.1:{free_ports(1)[0]}"))
    assert [(result.check, result.outcome) for result in results] == [("health", MISSING), ("models", MISSING)]
    assert "got no answer" in results[0].detail


def test_page_of_unknown_names_asks_for_a_map() -> None:
    assert conformance._best_engine({"other_metric"}) is None
    with partial() as server:
        server.metrics_path = "/health"
        results = conformance.metrics_results(server, "")
    assert "name them in engine.metrics of runtime openai" in results[0].detail


def test_main_prints_each_check_and_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    with partial("done") as server:
        assert conformance.main([server.url, "--runtime", "vllm"]) == 1
    *lines, last = capsys.readouterr().out.splitlines()
    assert last == "missing: stream"
    assert [line.split()[1] for line in lines] == [*REQUIRED, *conformance.ROUTES]
    with partial() as server:
        assert conformance.main([server.url]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "The gateway can use this server."
    assert conformance.main(["ftp://x"]) == 2
    assert "ftp://x is not http://HOST:PORT" in capsys.readouterr().err
