"""What the operator's configuration refuses."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from plimsoll.engines.registry import ENGINES
from plimsoll.resources.platform_config import EngineDefaults
from tests.chart.rendering import CHART

RESERVED = sorted({name for engine in ENGINES.values() for name in engine.reserved_variables})


@pytest.mark.parametrize("name", RESERVED)
def test_default_env_may_not_set_reserved_variable(name: str) -> None:
    with pytest.raises(ValidationError, match=f"engine.defaults.env may not set {name}"):
        EngineDefaults(env=({"name": "HF_TOKEN", "value": "x"}, {"name": name, "value": "x"}))


def test_default_env_may_set_other_variables() -> None:
    env = ({"name": "VLLM_LOGGING_LEVEL", "value": "DEBUG"},)
    assert EngineDefaults(env=env).env == env


def test_chart_refuses_the_same_variables() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    env = schema["properties"]["engine"]["properties"]["defaults"]["properties"]["env"]
    assert env["items"]["properties"]["name"]["not"]["enum"] == RESERVED
