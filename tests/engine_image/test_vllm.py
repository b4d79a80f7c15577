"""Real vLLM engines under the launcher on loopback: a prefill and a decode engine with a tiny model.

Needs an interpreter with vLLM, NIXL, pytest, pydantic and orjson. The tests run in order: the later ones take the
engines down.
"""

import contextlib
import http.client
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from launcher.contract import IMAGE_ROOT
from plimsoll.api.v1alpha1 import parse
from plimsoll.engines import conformance
from plimsoll.engines.conformance import OK, Server
from plimsoll.resources.engine_pod import default_engine_args
from tests import builders
from tests.ports import free_ports

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
ARGS = [
    "--enforce-eager",
    "--max-model-len",
    "4096",
    "--max-num-batched-tokens",
    "512",
    "--max-num-seqs",
    "16",
    "--kv-cache-memory-bytes",
    "67108864",
    "--dtype",
    "float32",
    "--block-size",
    "128",
]
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "fork",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclass
class Engine:
    """A launcher with a real engine; its log is kept."""

    process: subprocess.Popen[str]
    api: int
    port: int
    log: list[str] = field(default_factory=list)
    ready: threading.Event = field(default_factory=threading.Event)

    def read(self) -> None:
        """Keeps the log; says when the engine is ready or gone."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.log.append(line)
            if "ready after" in line:
                self.ready.set()
        self.ready.set()

    def post(
        self, body: dict[str, Any], headers: dict[str, str] | None = None, path: str = "/v1/completions"
    ) -> tuple[int, Any]:
        """A completion that is not streamed."""
        sent = {"content-type": "application/json", **(headers or {})}
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.api, timeout=120)) as connection:
            connection.request("POST", path, json.dumps(body), sent)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())

    @contextlib.contextmanager
    def stream(self, body: dict[str, Any], path: str = "/v1/completions") -> Iterator[http.client.HTTPResponse]:
        """A streamed completion whose first line has come."""
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.api, timeout=120)) as connection:
            sent = {"content-type": "application/json"}
            connection.request("POST", path, json.dumps({**body, "stream": True}), sent)
            answer = connection.getresponse()
            answer.readline()
            yield answer

    def about(self) -> Any:
        """What the launcher says of the engine."""
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)) as connection:
            connection.request("GET", "/about")
            return json.loads(connection.getresponse().read())

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that have these labels, from the launcher's port."""
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)) as connection:
            connection.request("GET", "/metrics")
            text = connection.getresponse().read().decode()
        expected = [f'{key}="{value}"' for key, value in labels.items()]
        lines = [line for line in text.splitlines() if re.match(rf"{re.escape(name)}[ {{]", line)]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if all(label in line for label in expected))


@dataclass
class Pair:
    """A prefill and a decode engine."""

    prefill: Engine
    decode: Engine


def body(prompt: str, tokens: int = 24, **more: Any) -> dict[str, Any]:
    """A greedy completion of exactly `tokens` tokens."""
    return {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0, **more}


def unique_prompt(seed: str, count: int = 60) -> str:
    """A prompt that no other test uses, a few hundred tokens long."""
    return f"{seed} " + f"The quick brown fox of {seed} jumps over the lazy dog. " * count


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The image's tiny model, made by the image's own script."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    subprocess.run(
        [sys.executable, IMAGE_ROOT / "image" / "make_tiny_model.py", folder], check=True, capture_output=True
    )
    return folder


@contextlib.contextmanager
def engine(
    model: Path, role: str, folder: Path, args: Sequence[str] = (), default_args: Sequence[str] = ARGS
) -> Iterator[Engine]:
    """An engine of a role under its launcher; `args` are the user's."""
    api, port, nixl = free_ports(3)
    document = json.loads((IMAGE_ROOT / "contract.json").read_text())
    document["ports"] = {"api": api, "launcher": port, "nixl": nixl}
    document["paths"]["state"] = str(folder / role / "state")
    document["drain"].update(min_handover_seconds=1, quiet_seconds=0.5, shutdown_timeout_seconds=60)
    folder.joinpath(role).mkdir()
    contract = folder / role / "contract.json"
    contract.write_text(json.dumps(document))
    environment = {
        **os.environ,
        **ENVIRONMENT,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(IMAGE_ROOT),
        "PLIMSOLL_CONTRACT": str(contract),
        "PLIMSOLL_ROLE": role,
        "PLIMSOLL_MODEL": str(model),
        "PLIMSOLL_SERVED_NAMES": '["tiny"]',
        "PLIMSOLL_DEFAULT_ARGS": json.dumps(default_args),
        "PLIMSOLL_ARGS": json.dumps(args),
        "PLIMSOLL_POD_IP": "127.0.0.1",
        "PLIMSOLL_REMOTE_PREFILL_DEADLINE_SECONDS": "30",
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "launcher"], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    running = Engine(process, api, port)
    reader = threading.Thread(target=running.read)
    reader.start()
    try:
        yield running
    finally:
        process.terminate()  # not killed: it must end its engine
        process.wait()
        reader.join()
        assert process.stdout is not None
        process.stdout.close()


@pytest.fixture(scope="module")
def pair(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Both engines, ready."""
    folder = tmp_path_factory.mktemp("pair")
    with engine(model, "prefill", folder) as prefill, engine(model, "decode", folder) as decode:
        for one in (prefill, decode):
            one.ready.wait()
            assert one.process.poll() is None, "".join(one.log[-40:])
        yield Pair(prefill, decode)


def test_vllm_startup_phases_are_measured(pair: Pair) -> None:
    line = next(line for line in pair.decode.log if "ready after" in line)
    print(line)
    for phase in ("launch", "import", "load", "init", "api", "warmup"):
        assert pair.decode.metric("plimsoll_engine_startup_phase_seconds", phase=phase) > 0


def test_vllm_engine_info_and_self_benchmark_of_both_roles(pair: Pair) -> None:
    for one, role in ((pair.prefill, "prefill"), (pair.decode, "decode")):
        said = one.about()
        print(said["self_benchmark"])
        assert (said["engine"], said["role"], said["phase"], said["ready"]) == ("vllm", role, None, True)
        assert (said["engine_version"], said["accelerator"]["name"]) == ("0.32.0+cpu", "cpu")
        assert said["limits"] == {
            "max_sequences": 16, "kv_tokens": 16384, "token_budget": 512, "block_tokens": 128, "max_model_len": 4096,
        }  # fmt: skip
        assert (said["config"]["model_type"], said["config"]["hidden_size"]) == ("qwen2", 256)
        assert said["self_benchmark"]["prefill"][0][0] == 16
        assert all(
            seconds > 0 for *_, seconds in (*said["self_benchmark"]["prefill"], *said["self_benchmark"]["decode"])
        )
    assert pair.prefill.about()["self_benchmark"]["decode"] == []


def test_vllm_remote_prefill_transfers_prompt_and_keeps_text(pair: Pair) -> None:
    moved = pair.decode.metric("vllm:prompt_tokens_by_source_total", source="external_kv_transfer")
    computed = pair.decode.metric("vllm:prompt_tokens_by_source_total", source="local_compute")
    prompt_tokens = 0
    for number in range(3):
        requested = body(unique_prompt(f"move{number}"))
        status, alone = pair.prefill.post(requested)
        assert status == 200
        status, split = pair.decode.post(requested, {"x-plimsoll-prefill": f"127.0.0.1:{pair.prefill.api}"})
        assert (status, split["choices"][0]["text"]) == (200, alone["choices"][0]["text"])
        prompt_tokens += split["usage"]["prompt_tokens"]
    after = pair.decode.metric("vllm:prompt_tokens_by_source_total", source="external_kv_transfer")
    print("prompt tokens", prompt_tokens, "moved", after - moved)
    assert after - moved == prompt_tokens
    assert pair.decode.metric("vllm:prompt_tokens_by_source_total", source="local_compute") == computed
    assert pair.decode.metric("plimsoll_engine_remote_prefills_total", outcome="remote") == 3


def test_vllm_request_with_named_model_is_rewritten(pair: Pair) -> None:
    request_body = {**body(unique_prompt("other")), "model": "busy/other"}
    named = {"x-plimsoll-model": "tiny", "x-plimsoll-prefill": f"127.0.0.1:{pair.prefill.api}"}
    before = pair.decode.metric("plimsoll_engine_remote_prefills_total", outcome="remote")
    status, got = pair.decode.post(request_body, named)
    assert (status, got["model"], got["usage"]["completion_tokens"]) == (200, "busy/other", 24)
    assert pair.decode.metric("plimsoll_engine_remote_prefills_total", outcome="remote") == before + 1


def test_vllm_client_transfer_params_are_ignored(pair: Pair) -> None:
    evil = {"do_remote_decode": True, "do_remote_prefill": False}
    for one in (pair.prefill, pair.decode):
        status, got = one.post(body(unique_prompt("evil"), kv_transfer_params=evil))
        assert (status, got["kv_transfer_params"]) == (200, None)


def test_vllm_dead_prefill_engine_falls_back_to_local(pair: Pair) -> None:
    (port,) = free_ports(1)
    status, got = pair.decode.post(body(unique_prompt("unreachable")), {"x-plimsoll-prefill": f"127.0.0.1:{port}"})
    assert (status, got["usage"]["completion_tokens"]) == (200, 24)
    assert pair.decode.metric("plimsoll_engine_remote_prefills_total", outcome="unreachable") == 1


def test_vllm_error_responses_have_openai_shape(pair: Pair) -> None:
    status, got = pair.decode.post({**body("a"), "model": "other"})
    assert (status, got["error"]["code"]) == (404, "model_not_found")
    status, got = pair.decode.post({**body(""), "prompt": [9] * 5000})
    assert (status, got["error"]["type"], got["error"]["code"]) == (
        400,
        "invalid_request_error",
        "context_length_exceeded",
    )


def test_vllm_tools_without_parser_are_rejected(pair: Pair) -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "tools": tools}
    for choice, flag in (
        ("auto", "--enable-auto-tool-choice"),
        ("required", "--tool-call-parser"),
    ):
        status, got = pair.decode.post({**body, "tool_choice": choice}, path="/v1/chat/completions")
        print(got)
        assert (status, got["error"]["type"]) == (400, "invalid_request_error")
        assert flag in got["error"]["message"]


def test_vllm_draining_engine_finishes_stream(pair: Pair) -> None:
    with pair.prefill.stream(body(unique_prompt("drain", 5), 1500, stream_options={"include_usage": True})) as stream:
        pair.prefill.process.send_signal(signal.SIGTERM)
        rest = stream.read().decode()
    usage = json.loads(rest.split("data: ")[-2])["usage"]
    assert rest.endswith("data: [DONE]\n\n")
    assert usage["completion_tokens"] == 1500
    assert pair.prefill.process.wait() == 0


def test_vllm_killed_engine_core_breaks_stream(pair: Pair) -> None:
    core = int(next(found[1] for line in pair.decode.log if (found := re.search(r"EngineCore pid=(\d+)", line))))
    with pair.decode.stream(body(unique_prompt("kill", 5), 3000)) as stream:
        os.kill(core, signal.SIGKILL)
        with pytest.raises(http.client.IncompleteRead) as cut:
            stream.read()
    print(cut.value.partial[-400:].decode())
    assert b"[DONE]" not in cut.value.partial
    assert b'data: {"error"' in cut.value.partial
    status, refused = pair.decode.post(body("a"))
    assert (status, refused["error"]["code"]) == (503, "engine_failed")
    assert pair.decode.process.wait() == 1


def test_vllm_with_the_operators_arguments_has_all(model: Path, tmp_path: Path) -> None:
    """What `python -m plimsoll.engines.conformance URL --pid PID` prints of it."""
    made = parse(builders.service(engine={"args": ARGS}, tiers={"serve": {}}))
    (tier,) = made.spec.sized_tiers.values()
    defaults = default_engine_args(made, "serve", tier, builders.PLATFORM)  # type: ignore[arg-type]
    with engine(model, "serve", tmp_path, ARGS, defaults) as running:
        running.ready.wait()
        assert running.process.poll() is None, "".join(running.log[-40:])
        server = Server(f"http://127.0.0.1:{running.api}", timeout_s=120.0)
        results = conformance.run(server, "vllm")
        results.append(conformance.check_drain(server, lambda: running.process.send_signal(signal.SIGTERM)))
        assert running.process.wait() == 0
    print(*(result.line() for result in results), sep="\n")
    assert {result.check for result in results if result.outcome != OK} == {"embeddings"}  # the model has none
    (metrics,) = (result.detail for result in results if result.check == "metrics")  # of drafts, and of NIXL
    assert metrics.endswith("; lacks draft_tokens, accepted_draft_tokens, post_s, transfer_s")
