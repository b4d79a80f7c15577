"""What mutual TLS adds to an engine's pod, and that nothing changes without it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from plimsoll.api import labels
from plimsoll.api.contract import engine_contract
from plimsoll.api.v1alpha1 import parse
from plimsoll.resources import engine_pod
from plimsoll.resources.platform_config import EngineTlsSettings
from tests import builders

Object = dict[str, Any]

SECURE = builders.PLATFORM.model_copy(
    update={"engine": builders.PLATFORM.engine.model_copy(update={"tls": EngineTlsSettings(secretName="engine-tls")})}
)


def template(platform: Any, **engine: Any) -> Object:
    service = builders.service(tiers={"serve": {}}, **({"engine": engine} if engine else {}))
    return engine_pod.pod_template(parse(service), "serve", platform)


@pytest.mark.parametrize("runtime", ["vllm", "simulated"])
def test_engine_mounts_secret_of_its_namespace(runtime: str) -> None:
    found = template(SECURE, runtime=runtime)
    container = found["spec"]["containers"][0]
    (volume,) = [one["secret"] for one in found["spec"]["volumes"] if one["name"] == "plimsoll-tls"]
    (mount,) = [one for one in container["volumeMounts"] if one["name"] == "plimsoll-tls"]
    environment = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert (volume["secretName"], volume["optional"]) == ("engine-tls", True)
    assert (mount["mountPath"], mount["readOnly"]) == (engine_contract().paths["tls"], True)
    assert json.loads(environment["PLIMSOLL_TLS"]) == {
        "secret": "team/engine-tls",
        "name": "plimsoll-engine.team.svc",
        "release": "plimsoll-internal.plimsoll-system.svc",
    }
    assert found["metadata"]["labels"][labels.TLS] == labels.MUTUAL_TLS


def test_engines_of_both_kinds_never_exchange_kv_blocks() -> None:
    revisions = [template(platform)["metadata"]["labels"][labels.REVISION] for platform in (SECURE, builders.PLATFORM)]
    assert len(set(revisions)) == 2


def test_engine_without_launcher_stays_plain() -> None:
    engine = {"runtime": "openai", "image": "example.com/server:1"}
    assert template(SECURE, **engine) == template(builders.PLATFORM, **engine)


def test_template_without_tls_names_none() -> None:
    assert "tls" not in json.dumps(template(builders.PLATFORM)).lower()
