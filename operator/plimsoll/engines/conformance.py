"""Tries a server with an OpenAI-compatible API, and says what of the engine contract it has.

Problem: whether a server fits shows only under load: a stream without usage, a cancelled request that runs on, metrics
under other names. Idea: a few short requests, each bounded in time and size, and one line for each check.

    python -m plimsoll.engines.conformance http://127.0.0.1:8080

A check is `ok`, `missing` (the gateway needs it), or a `note` (a signal or a route that is absent; what needs it does
not work). The exit status is 1 if a check is missing, 2 for a usage error. With the server's process as `--pid`, the
last check ends it with SIGTERM while a request runs.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

from plimsoll.engines.engine import HISTOGRAMS, Engine, MetricMap, Signal
from plimsoll.engines.registry import ENGINES

OK: Final = "ok"
MISSING: Final = "missing"
NOTE: Final = "note"

TIMEOUT_S: Final = 30.0  # of each request, from its head to its end
IDLE_WAIT_S: Final = 10.0  # until a cancelled request no longer runs
MAX_BODY_BYTES: Final = 4 * 1024 * 1024
MAX_EVENTS: Final = 4096
_PIECE_BYTES: Final = 65_536
OUTPUT_TOKENS: Final = 8
DRAINED_OUTPUT_TOKENS: Final = 200  # of the request that runs at SIGTERM
CANCELLED_OUTPUT_TOKENS: Final = 2000  # of the request that is cancelled; it must not be done before
PROMPT: Final = "Write a list of numbers."
OTHER_NAME: Final = "plimsoll-conformance-other-name"
JSON_HEADERS: Final = {"content-type": "application/json"}


class CheckFailed(Exception):
    """What the server did, and what was expected."""


@dataclass(frozen=True)
class Result:
    """The outcome of one check: OK, MISSING or NOTE, and a sentence."""

    check: str
    outcome: str
    detail: str

    def line(self) -> str:
        """The result as one line of text."""
        return f"{self.outcome:<8} {self.check:<12} {self.detail}"


@dataclass
class Server:
    """The server under test. url: without path. model: a name that it serves, "" for the first of its list."""

    url: str
    model: str = ""
    health_path: str = "/health"
    metrics_path: str = "/metrics"
    timeout_s: float = TIMEOUT_S
    idle_wait_s: float = IDLE_WAIT_S
    clock: Callable[[], float] = time.monotonic
    names: list[str] = field(default_factory=list)  # the models that it lists

    def request(self, method: str, path: str, document: Mapping[str, Any] | None = None) -> tuple[int, bytes]:
        """The status and body of an answer. Raises CheckFailed without one, or for one that is too long."""
        connection, response = self.open(method, path, document)
        deadline_s, body = self.clock() + self.timeout_s, bytearray()
        try:
            while piece := response.read1(_PIECE_BYTES):
                body += piece
                if len(body) > MAX_BODY_BYTES:
                    raise CheckFailed(f"{method} {path} answered more than {MAX_BODY_BYTES} bytes")
                if self.clock() > deadline_s:
                    raise CheckFailed(f"{method} {path} had no end within {self.timeout_s:.1f} s")
        except (OSError, http.client.HTTPException) as error:
            raise CheckFailed(f"{method} {path} was cut off: {error}") from error
        finally:
            connection.close()
        return response.status, bytes(body)

    def open(
        self, method: str, path: str, document: Mapping[str, Any] | None = None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """The connection and the answer's head. Raises CheckFailed."""
        parts = urlsplit(self.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=self.timeout_s)
        try:
            body = None if document is None else json.dumps(document).encode()
            connection.request(method, path, body, JSON_HEADERS if body else {})
            return connection, connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise CheckFailed(f"{method} {path} got no answer: {error}") from error

    def post(self, path: str, document: Mapping[str, Any]) -> dict[str, Any]:
        """The JSON object that answers a document. Raises CheckFailed for anything else."""
        status, body = self.request("POST", path, document)
        return _document(f"POST {path}", status, body)

    def chat(self, **fields: Any) -> dict[str, Any]:
        """The body of a chat request."""
        messages = [{"role": "user", "content": PROMPT}]
        return {"model": self.model, "messages": messages, "max_tokens": OUTPUT_TOKENS, **fields}


def _document(what: str, status: int, body: bytes) -> dict[str, Any]:
    if status != 200:
        raise CheckFailed(f"{what} answered {status}, not 200: {body[:200].decode(errors='replace')}")
    try:
        document = json.loads(body)
    except ValueError:
        raise CheckFailed(f"{what} did not answer JSON: {body[:80]!r}") from None
    if not isinstance(document, dict):
        raise CheckFailed(f"{what} answered a JSON {type(document).__name__}, not an object")
    return document


def check_health(server: Server) -> str:
    """The health path answers 200."""
    status, _ = server.request("GET", server.health_path)
    if status != 200:
        raise CheckFailed(f"GET {server.health_path} answered {status}, not 200")
    return f"GET {server.health_path} answers 200"


def check_models(server: Server) -> str:
    """The list of models has a name; requests use the first unless one is given."""
    status, body = server.request("GET", "/v1/models")
    listed = _document("GET /v1/models", status, body).get("data")
    entries = listed if isinstance(listed, list) else []
    server.names = [entry["id"] for entry in entries if isinstance(entry, dict) and isinstance(entry.get("id"), str)]
    if not server.names:
        raise CheckFailed("GET /v1/models lists no model with an id")
    server.model = server.model or server.names[0]
    return f"lists {', '.join(server.names[:5])}"


def check_chat(server: Server) -> str:
    """A chat request has an answer, a reason for its end, and usage within the limit."""
    document = server.post("/v1/chat/completions", server.chat())
    try:
        choice = document["choices"][0]
        message, reason = choice["message"], choice["finish_reason"]
    except (KeyError, IndexError, TypeError):
        raise CheckFailed("the answer has no choices[0] with message and finish_reason") from None
    if not isinstance(message, dict) or not reason:
        raise CheckFailed("choices[0].message is no object, or finish_reason is empty")
    prompt, output = _usage(document)
    if output > OUTPUT_TOKENS:
        raise CheckFailed(f"{output} output tokens exceed max_tokens {OUTPUT_TOKENS}")
    return f"{prompt} prompt and {output} output tokens, finish_reason {reason}"


def _usage(document: Mapping[str, Any]) -> tuple[int, int]:
    usage = document.get("usage")
    found = usage if isinstance(usage, dict) else {}
    prompt, output = found.get("prompt_tokens"), found.get("completion_tokens")
    if not isinstance(prompt, int) or not isinstance(output, int) or prompt < 1:
        raise CheckFailed("the answer has no usage with prompt_tokens and completion_tokens")
    return prompt, output


def check_name(server: Server) -> str:
    """The server takes a model name that it does not list, or refuses it with a 4xx."""
    status, _ = server.request("POST", "/v1/chat/completions", server.chat(model=OTHER_NAME))
    if status == 200:
        return "any model name is accepted"
    if 400 <= status < 500:
        return f"other model names are refused with {status}: serve the name that clients send"
    raise CheckFailed(f"another model name is answered with {status}, not 200 or 4xx")


def check_stream(server: Server) -> str:
    """A stream has events, usage if it is asked for, and an end mark."""
    options = {"stream": True, "stream_options": {"include_usage": True}}
    connection, response = server.open("POST", "/v1/chat/completions", server.chat(**options))
    try:
        _require_stream(response)
        events = list(_events(response, server))
    finally:
        connection.close()
    if not events or events[-1] != "[DONE]":
        raise CheckFailed(f"the stream of {len(events)} events does not end with [DONE]")
    documents = [json.loads(event) for event in events[:-1]]
    with_choices = [document for document in documents if document.get("choices")]
    if not with_choices:
        raise CheckFailed("no event has choices")
    with_usage = [document for document in documents if document.get("usage")]
    if not with_usage:
        raise CheckFailed("no event has usage, although stream_options.include_usage is set")
    prompt, output = _usage(with_usage[-1])
    return f"{len(with_choices)} events for {output} output tokens, usage ({prompt} prompt tokens), [DONE]"


def _require_stream(response: http.client.HTTPResponse) -> None:
    kind = response.getheader("content-type", "")
    if response.status != 200 or not kind.startswith("text/event-stream"):
        raise CheckFailed(f"a stream is answered with {response.status} and content-type {kind or 'none'}")


def _events(response: http.client.HTTPResponse, server: Server) -> Iterator[str]:
    """The data of each event. Raises CheckFailed for a stream that is cut off, too long, too slow or no JSON."""
    deadline_s, left_bytes = server.clock() + server.timeout_s, MAX_BODY_BYTES
    try:
        for _ in range(MAX_EVENTS):
            line = response.readline(left_bytes + 1)
            left_bytes -= len(line)
            if not line:
                return
            if left_bytes < 0:
                raise CheckFailed(f"the stream has more than {MAX_BODY_BYTES} bytes")
            if server.clock() > deadline_s:
                raise CheckFailed(f"the stream had no end within {server.timeout_s:.1f} s")
            if line.startswith(b"data:"):
                data = line[5:].strip().decode(errors="replace")
                if data != "[DONE]" and not isinstance(json.loads(data), dict):
                    raise CheckFailed(f"an event is no JSON object: {data[:80]}")
                yield data
    except (OSError, http.client.HTTPException) as error:
        raise CheckFailed(f"the stream was cut off: {error}") from error
    except ValueError as error:
        raise CheckFailed(f"an event is no JSON: {error}") from error
    raise CheckFailed(f"the stream has more than {MAX_EVENTS} lines")


def check_cancel(server: Server, metric_map: MetricMap | None) -> str:
    """A client that leaves ends its request: the server's own gauge says so, or else the next request is served."""
    long_chat = server.chat(stream=True, max_tokens=CANCELLED_OUTPUT_TOKENS)
    connection, response = server.open("POST", "/v1/chat/completions", long_chat)
    try:
        _require_stream(response)
        if next(_events(response, server), "[DONE]") == "[DONE]":
            raise CheckFailed("the stream has no event")
        gauges = {} if metric_map is None else dict(metric_map.signals)
        running = tuple(source.metric for source in gauges.get(Signal.RUNNING, ()))
        before = _gauge(server, running) if running else None
    finally:
        response.close()
        connection.close()
    if before == 0.0:
        check_chat(server)
        return "the next request is served; the request had ended, or was not counted yet, before it was cancelled"
    left_s, started_s = server.idle_wait_s, server.clock()
    while running and left_s > 0:
        count = _gauge(server, running)
        if count is None:
            break
        if count == 0.0:
            return f"a cancelled request is gone after {server.clock() - started_s:.1f} s"
        time.sleep(min(0.2, left_s))
        left_s = server.idle_wait_s - (server.clock() - started_s)
    if left_s <= 0:
        raise CheckFailed(f"a cancelled request still runs after {server.idle_wait_s:.0f} s")
    check_chat(server)
    return "the next request is served; no metric says whether the cancelled one runs on"


def _gauge(server: Server, metrics: tuple[str, ...]) -> float | None:
    """The sum of a gauge over its label sets; None without one."""
    status, body = server.request("GET", server.metrics_path)
    if status != 200:
        return None
    values = [float(rest.split()[0]) for name, rest in _samples(body) if name in metrics and rest.split()]
    return sum(values) if values else None


def _samples(body: bytes) -> Iterator[tuple[str, str]]:
    """The name of each sample of a metrics page, and what follows its labels."""
    for line in body.decode(errors="replace").splitlines():
        if line and not line.startswith("#"):
            name = line.split("{", 1)[0].split(" ", 1)[0]
            yield name, line.rpartition("}")[2] if "{" in line else line[len(name) :]


def metrics_results(server: Server, runtime: str) -> list[Result]:
    """What the metrics page has: the signals of an engine's map, of which "" is the engine that fits best."""
    status, body = server.request("GET", server.metrics_path)
    if status != 200:
        return [Result("metrics", NOTE, f"GET {server.metrics_path} answered {status}: the load of engines is unknown")]
    names = {name for name, _ in _samples(body)}
    engine = ENGINES[runtime] if runtime else _best_engine(names)
    if engine is None or engine.metrics is None:
        known = ", ".join(name for name, one in ENGINES.items() if one.metrics)
        detail = f"{len(names)} metrics, none of which is of {known}: name them in engine.metrics of runtime openai"
        return [Result("metrics", NOTE, detail)]
    found = [signal for signal in Signal if _has_signal(engine.metrics, signal, names)]
    mapped = [signal for signal, _ in engine.metrics.signals]
    absent = [signal for signal in mapped if signal not in found]
    detail = f"{engine.title}: has {', '.join(found) or 'none'}" + (f"; lacks {', '.join(absent)}" if absent else "")
    return [Result("metrics", OK if Signal.RUNNING in found else NOTE, detail)]


def _best_engine(names: set[str]) -> Engine | None:
    def signals(engine: Engine) -> int:
        metric_map = engine.metrics
        return 0 if metric_map is None else sum(_has_signal(metric_map, signal, names) for signal in Signal)

    best = max(ENGINES.values(), key=signals)
    return best if signals(best) else None


def _has_signal(metric_map: MetricMap, signal: Signal, names: set[str]) -> bool:
    sources = dict(metric_map.signals).get(signal, ())
    suffix = "_bucket" if signal in HISTOGRAMS else ""
    return any(f"{source.metric}{suffix}" in names for source in sources)


ROUTES: Final[Mapping[str, Callable[[str], tuple[str, dict[str, Any]]]]] = {
    "completions": lambda model: ("/v1/completions", {"model": model, "prompt": PROMPT, "max_tokens": 2}),
    "responses": lambda model: ("/v1/responses", {"model": model, "input": PROMPT, "max_output_tokens": 16}),
    "messages": lambda model: (
        "/v1/messages",
        {"model": model, "max_tokens": 2, "messages": [{"role": "user", "content": PROMPT}]},
    ),
    "embeddings": lambda model: ("/v1/embeddings", {"model": model, "input": PROMPT}),
    "tokenize": lambda model: ("/tokenize", {"model": model, "prompt": PROMPT, "content": PROMPT}),
}


def check_route(server: Server, route: str) -> Result:
    """Whether an optional route is served."""
    path, document = ROUTES[route](server.model)
    try:
        server.post(path, document)
    except CheckFailed as failure:
        return Result(route, NOTE, str(failure))
    return Result(route, OK, f"POST {path} answers")


def check_drain(server: Server, stop: Callable[[], None]) -> Result:
    """What a running request gets after `stop`, which ends the server: its rest, or no end."""
    try:
        chat = server.chat(stream=True, max_tokens=DRAINED_OUTPUT_TOKENS)
        connection, response = server.open("POST", "/v1/chat/completions", chat)
        try:
            _require_stream(response)
            events = _events(response, server)
            if next(events, "[DONE]") == "[DONE]":
                raise CheckFailed("the stream has no event")
            stop()
            if list(events)[-1:] != ["[DONE]"]:
                raise CheckFailed("the stream does not end with [DONE]")
        finally:
            connection.close()
    except (CheckFailed, OSError) as failure:
        return Result(
            "drain", NOTE, f"{failure}: a request that runs at SIGTERM may be cut, so pods must wait before it"
        )
    return Result("drain", OK, "a request that ran at SIGTERM got its end")


def run(server: Server, runtime: str = "", report: Callable[[Result], None] = lambda result: None) -> list[Result]:
    """Run all checks, and call `report` with each result as it comes. Without models or chat no more follow."""
    results: list[Result] = []

    def add(result: Result) -> bool:
        results.append(result)
        report(result)
        return result.outcome != MISSING

    def attempt(name: str, check: Callable[[], str]) -> bool:
        try:
            return add(Result(name, OK, check()))
        except CheckFailed as failure:
            return add(Result(name, MISSING, str(failure)))

    attempt("health", lambda: check_health(server))
    if not attempt("models", lambda: check_models(server)) and not server.model:
        return results
    if not attempt("chat", lambda: check_chat(server)):
        return results
    attempt("model-name", lambda: check_name(server))
    attempt("stream", lambda: check_stream(server))
    metric_map = _map_of(server, runtime)
    attempt("cancel", lambda: check_cancel(server, metric_map))
    try:
        for result in metrics_results(server, runtime):
            add(result)
    except CheckFailed as failure:
        add(Result("metrics", NOTE, f"{failure}: the load of engines is unknown"))
    for route in ROUTES:
        add(check_route(server, route))
    return results


def _map_of(server: Server, runtime: str) -> MetricMap | None:
    """The metric names of the given engine, or of the one that fits the page best; None without a page that fits."""
    if runtime:
        return ENGINES[runtime].metrics
    try:
        status, body = server.request("GET", server.metrics_path)
    except CheckFailed:
        return None
    best = _best_engine({name for name, _ in _samples(body)}) if status == 200 else None
    return None if best is None else best.metrics


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m plimsoll.engines.conformance", description=__doc__.split("\n")[0])
    parser.add_argument("url", metavar="URL", help="the server, such as http://127.0.0.1:8080")
    parser.add_argument("--model", default="", help="model name of the requests; default: the first of /v1/models")
    parser.add_argument("--pid", type=int, help="the server's process on this machine: ends it, to see how it drains")
    parser.add_argument("--runtime", choices=sorted(ENGINES), default="", help="engine whose metric names are expected")
    parser.add_argument("--health-path", default="/health", help="path that answers 200 when the server can serve")
    parser.add_argument("--metrics-path", default="", help="path of the metrics page; default: that of the engine")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Print one line for each check. Returns the exit status."""
    given = _parser().parse_args(arguments)
    parts = urlsplit(given.url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path not in ("", "/"):
        print(f"{given.url} is not http://HOST:PORT or https://HOST:PORT", file=sys.stderr)
        return 2
    metrics_path = given.metrics_path or (ENGINES[given.runtime].metrics_path if given.runtime else Engine.metrics_path)
    server = Server(given.url.rstrip("/"), given.model, given.health_path, metrics_path)
    results = run(server, given.runtime, lambda result: print(result.line(), flush=True))
    if given.pid is not None:
        print(check_drain(server, lambda: os.kill(given.pid, signal.SIGTERM)).line(), flush=True)
    missing = [result.check for result in results if result.outcome == MISSING]
    print(f"missing: {', '.join(missing)}" if missing else "The gateway can use this server.")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
