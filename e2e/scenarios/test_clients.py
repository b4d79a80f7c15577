"""Clients that nobody here wrote: the openai SDKs for Python and Node, LangChain, LiteLLM, and vLLM's own load tool."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from e2e.lib import remote_prefills, sdks, stack, tool_calls
from e2e.lib.kube import Cluster, Object
from e2e.lib.prober import Prober
from e2e.lib.service import Service
from e2e.lib.wait import wait_until

CLIENTS = Path(__file__).with_name("clients")
TOKENS = 12
IMAGE = "localhost:5001/plimsoll/engine-cpu:dev"


def _run(*argv: str, service: Service, cwd: Path | None = None) -> dict[str, Any]:
    """The client's findings, the last line that it prints."""
    env = {**os.environ, "NO_PROXY": "*", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false"}
    done = subprocess.run(
        [*argv, service.url, service.name], capture_output=True, text=True, timeout=300, check=False, cwd=cwd, env=env
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(found)
    return found


@pytest.mark.parametrize(
    ("script", "package"), [("openai_python", "openai"), ("langchain", "langchain_openai"), ("lite_llm", "litellm")]
)
@pytest.mark.parametrize("name", ["pd", "solo"])
def test_python_client_stream_equals_full_response(
    script: str, package: str, name: str, shared: dict[str, Service]
) -> None:
    sdks.require_package(package)
    found = _run(sys.executable, str(CLIENTS / f"{script}.py"), service=shared[name])
    assert found["same"], "the stream and the whole answer differ"
    assert found["tokens"][0] == TOKENS
    assert found["finish"] == "length"
    assert found.get("refusal", "model_not_found") == "model_not_found"
    assert set(found.get("models", shared)) >= shared.keys()


def test_sdk_tool_calls_and_structured_output_are_valid(pd: Service) -> None:
    """Across both tiers: the forced call, its stream, and the output of a schema are what the schema says."""
    sdks.require_package("openai")
    found = _run(sys.executable, str(CLIENTS / "openai_tools.py"), service=pd)
    for kind in ("named", "required", "streamed"):
        assert [name for name, _ in found[kind]] == [tool_calls.NAME], kind
    assert found["auto"] in ("length", "stop", "tool_calls")
    assert tool_calls.is_forecast(json.dumps(found["parsed"]))


def test_tool_calls_are_prefilled_remotely(pd: Service, prober: Prober) -> None:
    """The prefill engine gets the client's request with one token to make: no call is whole by then."""

    def run() -> dict[str, int]:
        with prober.paused():
            before, seed = pd.metrics("decode"), f"{time.time_ns()}"
            for name, fields in (
                ("named", {"tools": tool_calls.TOOLS, "tool_choice": tool_calls.NAMED}),
                ("schema", {"response_format": tool_calls.RESPONSE_FORMAT}),
            ):
                status, body, _ = tool_calls.ask(pd.target, f"{name} {seed}", **fields)
                assert status == 200, body
            return remote_prefills.outcomes(pd.metrics("decode") - before)

    assert remote_prefills.first_in_time(run, dict) == {"remote": 2}


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_tools_without_parser_return_vllm_400(choice: str, solo: Service) -> None:
    status, body, headers = tool_calls.ask(solo.target, choice, tools=tool_calls.TOOLS, tool_choice=choice)
    print(status, body)
    assert (status, body["error"]["type"]) == (400, "invalid_request_error")
    assert "--tool-call-parser" in body["error"]["message"]
    assert "x-plimsoll-reason" not in headers, "the engine's own words"


@pytest.fixture(scope="module")
def node_modules() -> Path:
    return sdks.node_folder()


@pytest.mark.parametrize("name", ["pd", "solo"])
def test_node_sdk_stream_equals_full_response(name: str, shared: dict[str, Service], node_modules: Path) -> None:
    script = shutil.copy2(CLIENTS / "openai_node.mjs", node_modules)  # Node looks for packages beside the script
    found = _run("node", str(script), service=shared[name], cwd=node_modules)
    assert found["same"], "the stream and the whole answer differ"
    assert found["tokens"] == [TOKENS, TOKENS]
    assert (found["finish"], found["refusal"]) == ("length", "model_not_found")
    assert set(found["models"]) >= shared.keys()


BENCH_REQUESTS, BENCH_TOKENS = 20, 16
SHOW = """
import json
found = json.load(open("/tmp/bench.json"))
print(json.dumps({key: found.get(key) for key in ("completed", "failed", "total_output_tokens", "median_ttft_ms")}))
"""


def _bench(url: str, model: str) -> Object:
    flags = {
        "backend": "openai-chat", "endpoint": "/v1/chat/completions", "base-url": url, "model": model,
        "tokenizer": "/models/tiny", "dataset-name": "random", "random-input-len": 200,
        "random-output-len": BENCH_TOKENS, "num-prompts": BENCH_REQUESTS, "request-rate": 3,
        "result-dir": "/tmp", "result-filename": "bench.json",
    }  # fmt: skip
    argv = [f"--{name}={value}" for name, value in flags.items()]
    run = 'vllm bench serve --ignore-eos --save-result --disable-tqdm "$@" && exec python3 -c "$SHOW"'
    env = {"SHOW": SHOW, "HOME": "/tmp", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    container: Object = {
        "name": "bench",
        "image": IMAGE,
        "command": ["sh", "-c", run, "bench", *argv],
        "env": [{"name": name, "value": value} for name, value in env.items()],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
    }
    spec: Object = {
        "containers": [container],
        "volumes": [{"name": "tmp", "emptyDir": {}}],
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "securityContext": {"runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}},
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "bench"}, "spec": spec}


def _final_phase(pod: Object | None) -> str | None:
    phase = ((pod or {}).get("status") or {}).get("phase")
    return str(phase) if phase in ("Succeeded", "Failed") else None


def test_vllm_bench_serve_gets_exact_token_count(pd: Service, cluster: Cluster, namespace: str) -> None:
    """Held to the exact token count: by its own word, cut streams are completed ones."""
    url = f"http://plimsoll-gateway.{stack.SYSTEM}.svc"
    cluster.apply(_bench(url, pd.name), namespace=namespace)
    phase = wait_until("the bench ends", lambda: _final_phase(cluster.get("pods", "bench", namespace)), 300)
    said = cluster.logs(namespace, "bench", "bench", tail=60)
    assert phase == "Succeeded", said
    found = json.loads(said.splitlines()[-1])
    print(found)
    assert found["completed"] == BENCH_REQUESTS
    assert found["total_output_tokens"] == BENCH_REQUESTS * BENCH_TOKENS
