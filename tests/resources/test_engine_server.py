"""The pod of an engine without a launcher, and what operator and gateway read from it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from plimsoll.adapters.engine_of_pod import api_port, engine_args, engine_of, has_launcher, metrics_address
from plimsoll.api import labels
from plimsoll.api.contract import engine_contract
from plimsoll.api.v1alpha1 import parse
from plimsoll.core.admission.request import MAX_REQUEST_SEQUENCES
from plimsoll.core.errors import InvalidSpec
from plimsoll.engines.engine import PROGRESS_SECONDS, Signal, Source
from plimsoll.engines.sglang import HEALTH_COMPUTES
from plimsoll.resources import engine_pod, objects
from tests import builders
from tests.gateway import kube_objects
from tests.gateway.kube_objects import build_catalog

Object = dict[str, Any]

LLAMA = {"runtime": "llama-cpp", "image": "example.com/llama:1", "args": ["--parallel", "2", "-c", "2048"]}
METRICS = {"path": "/prom", "port": 9100, "running": "running_now", "ttft": "ttft_seconds"}
OPENAI = {
    "runtime": "openai",
    "image": "example.com/server:1",
    "command": ["/server"],
    "args": ["--model", "$(PLIMSOLL_MODEL)"],
    "port": 9000,
    "healthPath": "/ready",
    "drainTimeout": "30s",
}


def service(engine: Object, **spec: Any) -> Object:
    return builders.service(engine=engine, tiers={"serve": {}}, **spec)


def pod_of(engine: Object, **spec: Any) -> Object:
    """The pod that a Deployment makes of the tier's template."""
    template = engine_pod.pod_template(parse(service(engine, **spec)), "serve", builders.PLATFORM)
    meta = {**template["metadata"], "name": "chat-serve-1", "namespace": "team", "uid": "u"}
    status = {"podIP": "10.0.0.1", "conditions": [{"type": "Ready", "status": "True"}]}
    return {"metadata": meta, "spec": template["spec"], "status": status}


def container(pod: Object) -> Object:
    found: Object = pod["spec"]["containers"][0]
    return found


def test_llama_cpp_pod_has_its_arguments_and_no_launcher() -> None:
    pod = pod_of(LLAMA, model={"uri": "pvc://models/m.gguf"})
    made = container(pod)
    own = "--model /models/claim/m.gguf --alias chat --host 0.0.0.0 --port 8000 --metrics --parallel 2 -c 2048"
    assert made["args"] == own.split()
    assert "command" not in made
    assert made["ports"] == [{"name": "api", "containerPort": 8000}]
    names = {entry["name"]: entry["value"] for entry in made["env"]}
    assert names["LLAMA_CACHE"] == f"{names['HF_HOME']}/llama-cpp"
    assert not {"PLIMSOLL_ARGS", "PLIMSOLL_RUNTIME", "VLLM_CACHE_ROOT"} & names.keys()
    assert names["OMP_NUM_THREADS"] == "1"  # the chart's


@pytest.mark.parametrize(("env", "value"), [([], "false"), ([{"name": HEALTH_COMPUTES, "value": "true"}], "true")])
def test_sglang_health_computes_only_if_asked(env: list[Object], value: str) -> None:
    made = container(pod_of({"runtime": "sglang", "image": "x:1", "env": env}))
    assert [entry["value"] for entry in made["env"] if entry["name"] == HEALTH_COMPUTES] == [value]


def test_other_engine_has_no_default_arguments_of_vllm() -> None:
    assert "--enforce-eager" in builders.PLATFORM.engine.defaults.args
    assert "--enforce-eager" not in json.dumps(pod_of(LLAMA))


@pytest.mark.parametrize(
    ("engine", "seconds"),
    [
        (LLAMA, 10 + 600),
        ({**LLAMA, "drainTimeout": "1m"}, 10 + 60),
        ({"runtime": "sglang", "image": "x:1", "drainTimeout": "1m"}, 10),
        (OPENAI, 10 + 30),
    ],
)
def test_terminating_pod_sleeps_unless_engine_drains(engine: Object, seconds: int) -> None:
    pod = pod_of(engine)
    assert container(pod)["lifecycle"]["preStop"]["sleep"]["seconds"] == seconds
    assert pod["spec"]["terminationGracePeriodSeconds"] > seconds


def test_probes_ask_the_health_path_and_wait_for_the_start() -> None:
    for engine, path in ((LLAMA, "/health"), (OPENAI, "/ready")):
        made = container(pod_of(engine))
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert made[probe]["httpGet"] == {"path": path, "port": "api"}
        startup = made["startupProbe"]
        assert startup["periodSeconds"] * startup["failureThreshold"] == 3600


def test_sglang_liveness_asks_for_progress() -> None:
    made = container(pod_of({"runtime": "sglang", "image": "x:1"}))
    paths = [made[probe]["httpGet"]["path"] for probe in ("startupProbe", "readinessProbe", "livenessProbe")]
    assert paths == ["/health", "/health", "/health_generate"]
    assert made["livenessProbe"]["timeoutSeconds"] > PROGRESS_SECONDS


def test_openai_pod_has_the_users_command_and_metrics() -> None:
    pod = pod_of({**OPENAI, "metrics": METRICS})
    made = container(pod)
    assert (made["command"], made["args"]) == (["/server"], ["--model", "$(PLIMSOLL_MODEL)"])
    assert made["ports"] == [{"name": "api", "containerPort": 9000}, {"name": "metrics", "containerPort": 9100}]
    address = metrics_address(pod)
    assert address is not None
    assert (address.port, address.path) == (9100, "/prom")
    assert address.names.signals == (
        (Signal.RUNNING, (Source("running_now"),)),
        (Signal.TTFT, (Source("ttft_seconds"),)),
    )


@pytest.mark.parametrize(
    ("engine", "name", "port"),
    [
        ({}, "vllm", 8001),
        ({"runtime": "simulated"}, "vllm", 8001),
        (LLAMA, "llama-cpp", 8000),
        ({"runtime": "sglang", "image": "x:1"}, "sglang", 8000),
        ({"runtime": "tgi", "image": "x:1"}, "tgi", 8000),
        ({"runtime": "tensorrt-llm", "image": "x:1"}, "tensorrt-llm", 8000),
        (OPENAI, "openai", None),
        ({**OPENAI, "metrics": {"running": "r"}}, "openai", 9000),
    ],
)
def test_pod_says_its_engine_and_its_metrics(engine: Object, name: str, port: int | None) -> None:
    pod = pod_of(engine)
    address = metrics_address(pod)
    assert engine_of(pod).name == name
    assert (None if address is None else address.port) == port
    assert address is None or address.path == engine_of(pod).metrics_path


def test_pod_of_target_has_metrics_and_no_launcher() -> None:
    adopted = {**pod_of({}), labels.ADOPTED: {"metricsPort": 9000, "gpus": 1, "model": "hf://a/b"}}
    address = metrics_address(adopted)
    assert address is not None
    assert (address.port, address.path, address.names.engine) == (9000, "/metrics", "vLLM")
    assert [has_launcher(pod) for pod in (pod_of({}), adopted, pod_of(LLAMA))] == [True, False, False]


def test_pod_with_another_annotation_raises_value_error() -> None:
    pod = pod_of({**OPENAI, "metrics": METRICS})
    for text in ("[]", "{}", '{"port":1,"path":"/","names":{"unheard":"x"}}', "no"):
        pod["metadata"]["annotations"][labels.METRICS] = text
        with pytest.raises(ValueError, match=r"annotation plimsoll\.dev/metrics has another form"):
            metrics_address(pod)


def test_pod_with_launcher_has_no_engine_label() -> None:
    assert labels.ENGINE not in pod_of({})["metadata"]["labels"]
    assert engine_args(pod_of({"args": ["--seed", "1"]})) == ("--enforce-eager", "--seed", "1")


@pytest.mark.parametrize(
    ("runtime", "args", "env", "sequences", "length", "queued"),
    [
        ("tgi", [], {"MAX_BATCH_SIZE": "8", "MAX_TOTAL_TOKENS": "2048", "MAX_CONCURRENT_REQUESTS": "64"}, 8, 2048, 64),
        ("tgi", ["--max-batch-size=4"], {"MAX_BATCH_SIZE": "8"}, 4, None, 128),  # the argument wins
        ("tgi", [], {"MAX_BATCH_SIZE": "many", "MAX_TOTAL_TOKENS": ""}, 128, None, 128),
        ("llama-cpp", [], {"LLAMA_ARG_N_PARALLEL": "2", "LLAMA_ARG_CTX_SIZE": "4096"}, 2, 2048, MAX_REQUEST_SEQUENCES),
        ("llama-cpp", ["-np", "4", "-c", "4096"], {"LLAMA_ARG_KV_UNIFIED": "true"}, 4, 4096, MAX_REQUEST_SEQUENCES),
        ("llama-cpp", ["-np", "4", "-c", "4096"], {"LLAMA_ARG_KV_UNIFIED": "false"}, 4, 1024, MAX_REQUEST_SEQUENCES),
    ],
)
def test_limits_in_the_environment_are_read_as_arguments(
    runtime: str, args: list[str], env: dict[str, str], sequences: int, length: int | None, queued: int
) -> None:
    variables = [{"name": name, "value": value} for name, value in env.items()]
    engine = {"runtime": runtime, "image": "example.com/x:1", "args": args, "env": variables}
    pod, obj = pod_of(engine), kube_objects.service()
    obj["spec"]["engine"] = engine
    found = build_catalog([obj], [pod]).services["team/chat"]
    assert (found.max_sequences, found.max_model_len, found.max_queued) == (sequences, length, queued)


@pytest.mark.parametrize("env", [None, "x", [1], [{"value": "8"}], [{"name": "MAX_BATCH_SIZE"}]])
def test_unreadable_environment_leaves_the_defaults(env: Any) -> None:
    obj = kube_objects.service()
    obj["spec"]["engine"] = {"runtime": "tgi", "env": env}
    assert build_catalog([obj], []).services["team/chat"].max_sequences == 128


def test_gateway_reads_slots_and_context_of_llama_cpp() -> None:
    pod, obj = pod_of(LLAMA), kube_objects.service()
    obj["spec"]["engine"] = LLAMA
    found = build_catalog([obj], [pod]).services["team/chat"]
    assert (found.max_sequences, found.max_model_len) == (2, 1024)
    assert [endpoint.address for endpoint in found.endpoints] == ["10.0.0.1:8000"]
    assert api_port(pod_of(OPENAI)) == 9000


@pytest.mark.parametrize(
    ("engine", "api", "metrics"),
    [(LLAMA, 8000, [8000]), (OPENAI, 9000, []), ({**OPENAI, "metrics": METRICS}, 9000, [9100]), ({}, 8000, [8001])],
)
def test_network_policy_and_service_have_the_engines_ports(engine: Object, api: int, metrics: list[int]) -> None:
    parent = service(engine)
    parsed = parse(parent)
    policy = objects.shared_objects(parsed, parent, builders.PLATFORM)[-1]
    first, *others, _ = policy["spec"]["ingress"]
    assert [port["port"] for port in first["ports"]] == [api]
    assert [port["port"] for rule in others for port in rule["ports"]] == metrics
    template = objects.StoredTemplate("x", {})
    headless = objects.tier_objects(parsed, parent, "serve", template, 1)[0]
    ports = {port["name"]: port["port"] for port in headless["spec"]["ports"]}
    launcher = engine_contract().ports["launcher"]
    assert ports == ({"api": api} if engine else {"api": api, "launcher": launcher})


def test_disaggregated_tiers_of_other_engine_are_refused() -> None:
    with pytest.raises(InvalidSpec, match=r"spec\.tiers\.prefill: engine sglang has no prefill and decode tiers"):
        parse(builders.service(engine={"runtime": "sglang", "image": "x:1"}))
