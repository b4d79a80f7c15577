"""Adapters in the planned objects: what restarts engines, and what does not."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from plimsoll.api.contract import engine_contract
from plimsoll.api.v1alpha1 import InferenceService, parse
from plimsoll.engines import desired_adapters
from plimsoll.resources import engine_pod, lora, objects
from tests import builders

Object = dict[str, Any]

SQL: Object = {"name": "sql", "uri": "hf://acme/sql", "revision": "v1", "pinned": True}
LAW: Object = {"name": "law", "uri": "pvc://weights/law/v1"}
SERVE: Object = {"tiers": {"serve": {}}}


def service(*adapters: Object, **spec: Any) -> InferenceService:
    return parse(builders.service(**{**SERVE, **spec, "adapters": list(adapters)}))


def template(one: InferenceService) -> Object:
    return engine_pod.pod_template(one, "serve", builders.PLATFORM)


def config(one: InferenceService) -> Any:
    made = lora.config_map(one, builders.service())
    return json.loads(made["data"][desired_adapters.FILE])["adapters"]


def pod_part(found: Object) -> tuple[list[Object], list[Object], Any]:
    """Volumes and mounts of adapters, and the bounds."""
    container = found["spec"]["containers"][0]
    environment = {entry["name"]: entry.get("value") for entry in container["env"]}
    paths = engine_contract().paths
    roots = (paths["adapters"], paths["adapter_claims"])
    return (
        [one for one in found["spec"]["volumes"] if one["name"].startswith("plimsoll-")],
        [one for one in container["volumeMounts"] if one["mountPath"].startswith(roots)],
        json.loads(environment.get("PLIMSOLL_LORA") or "null"),
    )


def test_config_map_has_what_the_launcher_loads() -> None:
    assert config(service(SQL, LAW)) == [
        {"name": "sql", "scheme": "hf", "location": "acme/sql", "revision": "v1", "pinned": True},
        {"name": "law", "scheme": "pvc", "location": "weights/law/v1", "revision": "", "pinned": False},
    ]


def test_pod_mounts_config_map_and_claims_read_only() -> None:
    volumes, mounts, bounds = pod_part(template(service(SQL, LAW)))
    assert volumes[0]["configMap"] == {"name": "chat-adapters"}
    assert volumes[1]["persistentVolumeClaim"] == {"claimName": "weights", "readOnly": True}
    assert [mount["mountPath"] for mount in mounts] == ["/etc/plimsoll/adapters", "/models/adapters/weights"]
    assert all(mount["readOnly"] for mount in mounts)
    assert bounds == {"max_loras": 8, "max_lora_rank": 16, "max_cpu_loras": 256}


def test_claim_of_the_model_has_one_volume_and_two_mounts() -> None:
    found = template(service(LAW, model={"uri": "pvc://weights/base"}))
    assert [
        one["persistentVolumeClaim"]["claimName"] for one in found["spec"]["volumes"] if "persistentVolumeClaim" in one
    ] == ["weights"]
    mounts = found["spec"]["containers"][0]["volumeMounts"]
    assert [one["mountPath"] for one in mounts if one["name"] == "model"] == [
        "/models/claim",
        "/models/adapters/weights",
    ]


def test_service_without_lora_is_as_before() -> None:
    assert pod_part(template(service())) == ([], [], None)
    kinds = [made["kind"] for made in objects.shared_objects(service(), builders.service(), builders.PLATFORM)]
    assert "ConfigMap" not in kinds
    assert objects.revision_name(service(), "serve") == objects.revision_name(parse(builders.service(**SERVE)), "serve")


def test_first_adapter_restarts_engines_unless_lora_is_enabled() -> None:
    assert objects.revision_name(service(), "serve") != objects.revision_name(service(SQL), "serve")
    engine = {"lora": {"maxLoras": 2}}
    assert objects.revision_name(service(engine=engine), "serve") == objects.revision_name(
        service(SQL, engine=engine), "serve"
    )


def test_new_claim_and_new_bounds_restart_engines() -> None:
    names = {
        objects.revision_name(one, "serve")
        for one in (service(SQL), service(SQL, LAW), service(SQL, engine={"lora": {"maxLoraRank": 64}}))
    }
    assert len(names) == 3


def test_simulated_engine_mounts_no_claim() -> None:
    volumes, mounts, _ = pod_part(template(service(LAW, engine={"runtime": "simulated"})))
    assert [len(volumes), len(mounts)] == [1, 1]


ADAPTER = st.builds(
    lambda name, repo, pinned: {"name": name, "uri": f"hf://acme/{repo}", "pinned": pinned},
    st.sampled_from("abcdef"),
    st.sampled_from(["x", "y"]),
    st.booleans(),
)
ADAPTERS = st.lists(ADAPTER, min_size=1, max_size=6, unique_by=lambda adapter: str(adapter["name"]))


@given(ADAPTERS, ADAPTERS)
def test_adapters_without_claims_never_change_the_pod(before: list[Object], after: list[Object]) -> None:
    first, second = service(*before), service(*after)
    assert objects.revision_name(first, "serve") == objects.revision_name(second, "serve")
    assert template(first) == template(second)
    assert [entry["name"] for entry in config(second)] == [adapter["name"] for adapter in after]
