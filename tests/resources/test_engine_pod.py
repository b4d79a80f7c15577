"""The engine's pod: what a spec becomes, and what always holds."""

from __future__ import annotations

import json
from typing import Any

import pytest

from plimsoll.api import labels
from plimsoll.api.contract import engine_contract
from plimsoll.api.v1alpha1 import parse
from plimsoll.api.v1alpha1.pod_overrides import RESERVED_MOUNTS, RESERVED_VOLUMES
from plimsoll.resources import engine_pod
from plimsoll.resources.platform_config import EngineDefaults, NodeCacheSettings, PlatformConfig
from tests import builders

Object = dict[str, Any]


def rendered(kind: str = "decode", platform: Any = builders.PLATFORM, **spec: Any) -> Object:
    return engine_pod.pod_template(parse(builders.service(**spec)), kind, platform)  # type: ignore[arg-type]


def container(template: Object) -> Object:
    found: Object = template["spec"]["containers"][0]
    return found


def environment(template: Object) -> dict[str, Any]:
    return {e["name"]: e.get("value", e.get("valueFrom")) for e in container(template)["env"]}


def tiers(**decode: Any) -> Object:
    return {"prefill": {}, "decode": decode}


def with_defaults(defaults: EngineDefaults) -> PlatformConfig:
    engine = builders.PLATFORM.engine.model_copy(update={"defaults": defaults})
    return builders.PLATFORM.model_copy(update={"engine": engine})


def test_pod_meets_restricted_standard() -> None:
    made = rendered()
    security = container(made)["securityContext"]
    assert security["runAsNonRoot"] is True
    assert security["readOnlyRootFilesystem"] is True
    assert security["allowPrivilegeEscalation"] is False
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    assert made["spec"]["automountServiceAccountToken"] is False


def test_pod_requests_limits_and_tolerates_gpus() -> None:
    made = rendered(tiers=tiers(gpus=4))
    assert container(made)["resources"]["requests"]["nvidia.com/gpu"] == "4"
    assert container(made)["resources"]["limits"]["nvidia.com/gpu"] == "4"
    assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in made["spec"]["tolerations"]
    assert json.loads(environment(made)["PLIMSOLL_DEFAULT_ARGS"])[2:4] == ["--tensor-parallel-size", "4"]


@pytest.mark.parametrize(
    ("args", "size"),
    [
        (["--data-parallel-size", "8"], "1"),
        (["-dp=2"], "4"),
        (["--data_parallel_size=2", "--pipeline-parallel-size", "2"], "2"),
        (["--data-parallel-size", "2", "--tensor-parallel-size", "2"], "8"),  # the user's size follows and wins
        (["--data-parallel-size", "2", "--prefill-context-parallel-size=2"], "2"),
        ([], "8"),
    ],
)
def test_pod_tensor_parallel_size_is_what_other_sizes_leave(args: list[str], size: str) -> None:
    """`gpus: 8` with data parallelism of 8 is eight copies on one GPU each, not on 64 GPUs."""
    made = rendered("serve", tiers={"serve": {"gpus": 8}}, engine={"args": args})
    assert json.loads(environment(made)["PLIMSOLL_DEFAULT_ARGS"])[:2] == ["--tensor-parallel-size", size]


@pytest.mark.parametrize(
    ("task", "default_args"),
    [("embed", ["--runner", "pooling"]), ("score", ["--runner", "pooling"]), ("transcribe", [])],
)
def test_task_reaches_launcher_and_runner(task: str, default_args: list[str]) -> None:
    spec = {"model": {"uri": "hf://org/m", "task": task}, "tiers": {"serve": {}}}
    made = rendered("serve", **spec)
    assert environment(made)["PLIMSOLL_TASK"] == task
    assert json.loads(environment(made)["PLIMSOLL_DEFAULT_ARGS"])[: len(default_args)] == default_args
    assert ("--runner" in environment(made)["PLIMSOLL_DEFAULT_ARGS"]) == bool(default_args)


def test_pod_of_default_task_is_as_before() -> None:
    explicit = rendered("serve", model={"uri": "hf://org/m", "task": "generate"}, tiers={"serve": {}})
    assert explicit == rendered("serve", model={"uri": "hf://org/m"}, tiers={"serve": {}})
    assert "PLIMSOLL_TASK" not in environment(explicit)


def test_pod_without_gpus_mentions_no_gpu_resource() -> None:
    made = rendered(tiers=tiers(gpus=0))
    assert "nvidia.com/gpu" not in json.dumps(made)


def test_pod_uses_custom_gpu_resource_everywhere() -> None:
    made = rendered(tiers=tiers(gpus=1, gpuResource="amd.com/gpu"))
    assert container(made)["resources"]["limits"]["amd.com/gpu"] == "1"
    assert [t["key"] for t in made["spec"]["tolerations"]] == ["amd.com/gpu"]


def test_pod_user_resources_override_chart_by_key() -> None:
    made = rendered(tiers=tiers(gpus=0, pod={"resources": {"requests": {"cpu": "3"}}}))
    assert container(made)["resources"] == {"requests": {"cpu": "3", "memory": "1Gi"}, "limits": {"memory": "2Gi"}}


def test_pod_default_request_is_at_most_the_users_limit() -> None:
    defaults = EngineDefaults(resources={"requests": {"cpu": "2", "memory": "8Gi"}})
    platform = with_defaults(defaults)
    assert container(rendered(platform=platform))["resources"]["requests"] == {
        "cpu": "2",
        "memory": "8Gi",
        "nvidia.com/gpu": "1",
    }
    limited = tiers(gpus=0, pod={"resources": {"limits": {"memory": "4Gi", "cpu": 3}}})
    assert container(rendered(platform=platform, tiers=limited))["resources"] == {
        "requests": {"cpu": "2", "memory": "4Gi"},
        "limits": {"memory": "4Gi", "cpu": 3},
    }


def test_pod_spread_is_soft_and_over_zones_for_serve_only() -> None:
    made = {
        "serve": rendered("serve", tiers={"serve": {}}),
        "prefill": rendered("prefill"),
        "decode": rendered("decode"),
    }
    keys = {kind: [c["topologyKey"] for c in one["spec"]["topologySpreadConstraints"]] for kind, one in made.items()}
    host = "kubernetes.io/hostname"
    assert keys == {"serve": ["topology.kubernetes.io/zone", host], "prefill": [host], "decode": [host]}
    for kind, one in made.items():
        for constraint in one["spec"]["topologySpreadConstraints"]:
            assert constraint["whenUnsatisfiable"] == "ScheduleAnyway"
            wanted = constraint["labelSelector"]["matchLabels"]
            assert wanted[labels.ROLE] == kind
            assert wanted.items() <= one["metadata"]["labels"].items()


def test_pod_spread_of_user_wins() -> None:
    own = {"topologyKey": "rack", "whenUnsatisfiable": "DoNotSchedule", "minDomains": 2}
    [made] = rendered(tiers=tiers(pod={"topologySpreadConstraints": [own]}))["spec"]["topologySpreadConstraints"]
    assert made.items() >= {**own, "maxSkew": 1}.items()
    assert made["labelSelector"]["matchLabels"][labels.ROLE] == "decode"
    selector = {"matchLabels": {"a": "b"}}
    [made] = rendered(tiers=tiers(pod={"topologySpreadConstraints": [{**own, "labelSelector": selector}]}))["spec"][
        "topologySpreadConstraints"
    ]
    assert made["labelSelector"] == selector
    assert "topologySpreadConstraints" not in rendered(tiers=tiers(pod={"topologySpreadConstraints": []}))["spec"]


def test_pod_ipc_lock_is_added_only_if_requested() -> None:
    assert container(rendered(tiers=tiers(pod={"ipcLock": True})))["securityContext"]["capabilities"] == {
        "drop": ["ALL"],
        "add": ["IPC_LOCK"],
    }


def test_pod_empty_dirs_have_size_limits() -> None:
    made = rendered(tiers=tiers(pod={"sharedMemory": "32Gi"}), model={"uri": "hf://a/b"})
    sizes = {v["name"]: v["emptyDir"]["sizeLimit"] for v in made["spec"]["volumes"] if "emptyDir" in v}
    assert sizes.keys() == {"scratch", "home", "shm", "model-cache"}
    assert sizes["shm"] == "32Gi"


def test_pod_args_are_role_then_chart_then_user() -> None:
    found = environment(rendered(engine={"args": ["--block-size=64"]}))
    assert json.loads(found["PLIMSOLL_DEFAULT_ARGS"]) == ["--block-size", "128", "--enforce-eager"]
    assert json.loads(found["PLIMSOLL_ARGS"]) == ["--block-size=64"]


def test_pod_aggregated_tier_has_no_block_size() -> None:
    made = rendered("serve", tiers={"serve": {}})
    assert "--block-size" not in environment(made)["PLIMSOLL_DEFAULT_ARGS"]


def test_pod_user_env_overrides_without_duplicates() -> None:
    made = rendered(engine={"env": [{"name": "OMP_NUM_THREADS", "value": "8"}, {"name": "HF_HOME", "value": "/x"}]})
    names = [e["name"] for e in container(made)["env"]]
    assert len(names) == len(set(names))
    assert environment(made)["OMP_NUM_THREADS"] == "8"
    assert environment(made)["HF_HOME"] == "/x"


@pytest.mark.parametrize(
    ("uri", "model", "volume"),
    [
        ("hf://Qwen/Qwen3-8B", "Qwen/Qwen3-8B", {"emptyDir": {"sizeLimit": "64Gi"}}),
        ("file:///models/tiny", "/models/tiny", None),
        (
            "pvc://weights/a/b",
            "/models/claim/a/b",
            {"persistentVolumeClaim": {"claimName": "weights", "readOnly": True}},
        ),
        ("s3://models/team/chat", "/tmp/model", {"emptyDir": {"sizeLimit": "64Gi"}}),
        ("gs://models/team/chat", "/tmp/model", {"emptyDir": {"sizeLimit": "64Gi"}}),
        ("https://example.com/chat.tar", "/tmp/model", {"emptyDir": {"sizeLimit": "64Gi"}}),
        (
            "oci://ghcr.io/team/chat:1",
            "/models/image",
            {"image": {"reference": "ghcr.io/team/chat:1", "pullPolicy": "IfNotPresent"}},
        ),
    ],
)
def test_pod_model_location_follows_uri(uri: str, model: str, volume: Object | None) -> None:
    made = rendered(model={"uri": uri})
    assert environment(made)["PLIMSOLL_MODEL"] == model
    extra = [v for v in made["spec"]["volumes"] if v["name"] in ("model", "model-cache")]
    assert [{k: v for k, v in e.items() if k != "name"} for e in extra] == ([volume] if volume else [])


def test_pod_fetched_model_has_source_digest_and_keys() -> None:
    digest = "sha256:" + "0" * 64
    model = {"uri": "s3://models/chat", "digest": digest, "secretRef": {"name": "s3"}, "cache": {"claimName": "hub"}}
    made = rendered(model=model)
    found = environment(made)
    assert (found["PLIMSOLL_MODEL_SOURCE"], found["PLIMSOLL_MODEL_DIGEST"]) == ("s3://models/chat", digest)
    keys = {
        e["name"]: e["valueFrom"]["secretKeyRef"]
        for e in made["spec"]["containers"][0]["env"]
        if "valueFrom" in e and "secretKeyRef" in e["valueFrom"]
    }
    assert keys == {
        "AWS_ACCESS_KEY_ID": {"name": "s3", "key": "AWS_ACCESS_KEY_ID"},
        "AWS_SECRET_ACCESS_KEY": {"name": "s3", "key": "AWS_SECRET_ACCESS_KEY"},
        "AWS_SESSION_TOKEN": {"name": "s3", "key": "AWS_SESSION_TOKEN", "optional": True},
    }
    assert {"name": "model-cache", "persistentVolumeClaim": {"claimName": "hub"}} in made["spec"]["volumes"]
    assert {"name": "model-cache", "mountPath": "/models/cache"} in made["spec"]["containers"][0]["volumeMounts"]


def test_pod_cache_of_the_node_is_the_platforms_folder() -> None:
    cached = {"uri": "s3://models/chat", "cache": {"nodeLocal": True}}
    node_cache = {"node_cache": NodeCacheSettings(path="/cache", size="1Gi")}
    engine = builders.PLATFORM.engine.model_copy(update=node_cache)
    platform = builders.PLATFORM.model_copy(update={"engine": engine})
    made = engine_pod.pod_template(parse(builders.service(model=cached)), "prefill", platform)
    assert {"name": "model-cache", "hostPath": {"path": "/cache", "type": "Directory"}} in made["spec"]["volumes"]
    assert environment(made)["PLIMSOLL_MODEL_CACHE_BYTES"] == str(2**30)
    without = rendered(model=cached)
    assert {"name": "model-cache", "emptyDir": {"sizeLimit": "64Gi"}} in without["spec"]["volumes"]
    assert "PLIMSOLL_MODEL_CACHE_BYTES" not in environment(without)


def test_pod_web_archive_has_a_bearer_token() -> None:
    made = rendered(model={"uri": "https://example.com/chat.tgz", "secretRef": {"name": "web", "key": "pass"}})
    (token,) = (e for e in made["spec"]["containers"][0]["env"] if e["name"] == "PLIMSOLL_MODEL_TOKEN")
    assert token["valueFrom"] == {"secretKeyRef": {"name": "web", "key": "pass"}}


def test_pod_image_model_may_be_in_a_folder() -> None:
    made = rendered(model={"uri": "oci://ghcr.io/team/chat:1", "path": "models/chat"})
    assert environment(made)["PLIMSOLL_MODEL"] == "/models/image/models/chat"
    mount = {"name": "model", "mountPath": "/models/image", "readOnly": True}
    assert mount in made["spec"]["containers"][0]["volumeMounts"]


def test_pod_cache_claim_and_hf_token_are_mounted() -> None:
    model = {"uri": "hf://a/b", "cache": {"claimName": "hub"}, "secretRef": {"name": "hf"}}
    made = rendered(model=model)
    assert {"name": "model-cache", "persistentVolumeClaim": {"claimName": "hub"}} in made["spec"]["volumes"]
    assert environment(made)["HF_TOKEN"] == {"secretKeyRef": {"name": "hf", "key": "token"}}


def test_pod_cache_of_the_node_must_exist() -> None:
    made = rendered(model={"uri": "s3://models/chat", "cache": {"hostPath": "/var/models"}})
    volume = {"name": "model-cache", "hostPath": {"path": "/var/models", "type": "Directory"}}
    assert volume in made["spec"]["volumes"]
    mounts = made["spec"]["containers"][0]["volumeMounts"]
    assert [one["mountPath"] for one in mounts if one["name"] == "model-cache"]


@pytest.mark.parametrize(
    ("uri", "cache", "folder"),
    [
        ("s3://models/chat", {"claimName": "hub"}, "/models/cache/.compiled"),
        ("hf://a/b", {"hostPath": "/var/models"}, "/home/plimsoll/hf/.compiled"),
        ("hf://a/b", {"nodeLocal": True}, "/home/plimsoll/.cache"),
        ("hf://a/b", {}, "/home/plimsoll/.cache"),
        ("pvc://weights/chat", {}, "/home/plimsoll/.cache"),
    ],
)
def test_compiled_code_outlives_the_pod_on_the_services_volume(uri: str, cache: Object, folder: str) -> None:
    made = environment(rendered(model={"uri": uri, "cache": cache}))
    names = {
        "VLLM_CACHE_ROOT": "vllm",
        "TORCHINDUCTOR_CACHE_DIR": "torchinductor",
        "TRITON_CACHE_DIR": "triton",
        "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    }
    assert {name: made[name] for name in names} == {name: f"{folder}/{last}" for name, last in names.items()}
    assert made["VLLM_ENABLE_STARTUP_PLAN"] == "1"


def test_pod_overrides_are_applied() -> None:
    overrides = {
        "nodeSelector": {"pool": "h200"},
        "affinity": {"nodeAffinity": {}},
        "runtimeClassName": "nvidia",
        "priorityClassName": "high",
        "schedulerName": "mine",
        "serviceAccountName": "me",
        "imagePullSecrets": [{"name": "reg"}],
        "annotations": {"example.com/a": "b"},
        "labels": {"example.com/team": "x"},
        "volumes": [{"name": "extra", "emptyDir": {}}],
        "volumeMounts": [{"name": "extra", "mountPath": "/extra"}],
    }
    made = rendered(tiers=tiers(gpus=0, pod=overrides))
    spec = made["spec"]
    assert spec["nodeSelector"] == {"pool": "h200"}
    assert spec["affinity"] == {"nodeAffinity": {}}
    assert (spec["runtimeClassName"], spec["priorityClassName"], spec["schedulerName"]) == ("nvidia", "high", "mine")
    assert spec["serviceAccountName"] == "me"
    assert spec["imagePullSecrets"] == [{"name": "reg"}]
    assert {"name": "extra", "emptyDir": {}} in spec["volumes"]
    assert "/extra" in [m["mountPath"] for m in container(made)["volumeMounts"]]
    assert made["metadata"]["annotations"] == {"example.com/a": "b"}
    assert made["metadata"]["labels"]["example.com/team"] == "x"


def test_pod_grace_period_exceeds_drain() -> None:
    drain = engine_contract().drain
    for engine, seconds in (({}, drain["shutdown_timeout_seconds"]), ({"drainTimeout": "1h30m"}, 5400)):
        made = rendered(engine=engine)
        assert environment(made)["PLIMSOLL_SHUTDOWN_TIMEOUT_SECONDS"] == str(seconds)
        grace = made["spec"]["terminationGracePeriodSeconds"]
        assert grace == drain["max_rejecting_seconds"] + seconds + drain["grace_margin_seconds"]


def test_pod_revision_is_shared_by_pd_and_changes_with_engine() -> None:
    def revision(kind: str, **spec: Any) -> str:
        return str(rendered(kind, **spec)["metadata"]["labels"][labels.REVISION])

    assert revision("prefill") == revision("decode") == revision("decode", tiers=tiers(gpus=2))
    assert revision("decode", engine={"args": ["--kv-cache-dtype=fp8"]}) != revision("decode")
    assert revision("decode", engine={"image": "other:1"}) != revision("decode")


@pytest.mark.parametrize(
    ("reference", "repository"),
    [
        ("engine", "engine"),
        ("engine:1", "engine"),
        ("host:5000/team/engine", "host:5000/team/engine"),
        ("host:5000/team/engine:1", "host:5000/team/engine"),
        ("host/engine@sha256:abc", "host/engine"),
        ("host/engine:1@sha256:abc", "host/engine"),
    ],
)
def test_repository_strips_tag_and_digest(reference: str, repository: str) -> None:
    assert engine_pod.image_repository(reference) == repository


def test_pod_engine_version_sets_image_tag() -> None:
    assert container(rendered(engine={"version": "9"}))["image"] == "example.com/engine:9"


SIMULATED = {"runtime": "simulated"}
SIMULATED_PLATFORM = builders.PLATFORM.model_copy(
    update={
        "engine": builders.PLATFORM.engine.model_copy(
            update={"simulated_image": "example.com/simulated:1", "runtime_class_name": "nvidia"}
        )
    }
)


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        ({}, "example.com/engine:1"),
        (SIMULATED, "example.com/simulated:1"),
        ({**SIMULATED, "version": "9"}, "example.com/simulated:9"),
        ({**SIMULATED, "image": "own:2"}, "own:2"),
    ],
)
def test_pod_image_follows_runtime(engine: Object, expected: str) -> None:
    assert container(rendered(platform=SIMULATED_PLATFORM, engine=engine))["image"] == expected


@pytest.mark.parametrize("runtime", ["vllm", "simulated"])
def test_pod_env_sets_runtime(runtime: str) -> None:
    assert environment(rendered(engine={"runtime": runtime}))["PLIMSOLL_RUNTIME"] == runtime


@pytest.mark.parametrize(
    "model",
    [
        {"uri": "hf://a/b", "secretRef": {"name": "absent"}},
        {"uri": "hf://a/b", "cache": {"claimName": "absent"}},
        {"uri": "pvc://absent/path"},
        {"uri": "file:///absent"},
        {"uri": "s3://absent/path", "secretRef": {"name": "absent"}},
        {"uri": "oci://absent/path:1"},
    ],
    ids=str,
)
def test_pod_simulated_engine_needs_no_weights_or_gpus(model: Object) -> None:
    made = rendered(platform=SIMULATED_PLATFORM, model=model, engine=SIMULATED, tiers=tiers(gpus=2))
    assert {v["name"] for v in made["spec"]["volumes"]} == {"scratch", "home", "shm"}
    assert {m["name"] for m in container(made)["volumeMounts"]} == {"scratch", "home", "shm"}
    assert "HF_TOKEN" not in environment(made)
    assert "nvidia" not in json.dumps(made)
    assert "tolerations" not in made["spec"]
    assert json.loads(environment(made)["PLIMSOLL_DEFAULT_ARGS"])[2:4] == ["--tensor-parallel-size", "2"]


def test_pod_simulated_engine_keeps_user_overrides() -> None:
    own = {"runtimeClassName": "gvisor", "resources": {"limits": {"memory": "1Gi"}}}
    made = rendered(platform=SIMULATED_PLATFORM, engine=SIMULATED, tiers=tiers(pod=own))
    assert made["spec"]["runtimeClassName"] == "gvisor"
    assert container(made)["resources"]["limits"] == {"memory": "1Gi"}


def test_pod_simulated_engine_has_own_revision() -> None:
    real, simulated = rendered(platform=SIMULATED_PLATFORM), rendered(platform=SIMULATED_PLATFORM, engine=SIMULATED)
    assert real["metadata"]["labels"][labels.REVISION] != simulated["metadata"]["labels"][labels.REVISION]


def test_pod_own_volumes_and_mounts_are_reserved() -> None:
    for uri in ("hf://a/b", "pvc://claim/path", "file:///models/tiny"):
        made = rendered(model={"uri": uri})
        assert {v["name"] for v in made["spec"]["volumes"]} <= set(RESERVED_VOLUMES)
        assert {m["mountPath"] for m in container(made)["volumeMounts"]} <= set(RESERVED_MOUNTS)


def test_engine_serves_under_its_long_name_first() -> None:
    made = rendered(model={"uri": "file:///models/tiny", "name": "public"})
    assert json.loads(environment(made)["PLIMSOLL_SERVED_NAMES"]) == ["team/chat", "public"]


def test_engine_serves_one_name_where_both_are_equal() -> None:
    made = rendered(model={"uri": "file:///models/tiny", "name": "team/chat"})
    assert json.loads(environment(made)["PLIMSOLL_SERVED_NAMES"]) == ["team/chat"]
