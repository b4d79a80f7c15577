"""The examples for Terraform and Pulumi have manifests that Plimsoll accepts, and wait for conditions that exist.

Neither tool runs here. `hcl_value` reads the part of HCL that the example uses: literals, objects and lists.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from plimsoll.api.conditions import ConditionType
from plimsoll.api.v1alpha1 import parse
from tests.chart.rendering import ROOT

TERRAFORM = (ROOT / "examples" / "terraform" / "main.tf").read_text()
PULUMI = yaml.safe_load((ROOT / "examples" / "pulumi" / "Pulumi.yaml").read_text())


def hcl_value(text: str) -> Any:
    """An HCL object as Python has it: `name = value` lines become a YAML flow mapping."""
    lines = [re.sub(r"^(\w+)\s*=\s*", r'"\1": ', line.strip()) for line in text.splitlines()]
    return yaml.safe_load("\n".join(line if line.endswith(("{", "[", ",")) else f"{line}," for line in lines)[:-1])


def terraform_manifest() -> Any:
    found = re.search(r"^  manifest = (\{\n.*?^  \})$", TERRAFORM, re.MULTILINE | re.DOTALL)
    assert found is not None
    return hcl_value(found[1])


def test_hcl_object_is_read() -> None:
    assert hcl_value('{\n  a = 1\n  b = [\n    {\n      c = "x"\n    },\n  ]\n}') == {"a": 1, "b": [{"c": "x"}]}


def test_terraform_and_pulumi_deliver_the_same_service() -> None:
    [by_pulumi] = PULUMI["resources"]["chat"]["properties"]["objs"]
    by_terraform = terraform_manifest()
    assert parse(by_terraform).model_name == parse(by_pulumi).model_name == "chat"
    assert by_terraform["spec"] == by_pulumi["spec"]


def test_waited_for_condition_exists() -> None:
    [by_pulumi] = PULUMI["resources"]["chat"]["properties"]["objs"]
    awaited = by_pulumi["metadata"]["annotations"]["pulumi.com/waitFor"].removeprefix("condition=")
    found = re.search(r'condition \{\s+type\s+= "(\w+)"\s+status = "True"', TERRAFORM)
    assert found is not None
    assert {awaited, found[1]} == {ConditionType.READY.value}


def test_definition_for_typed_classes_exists() -> None:
    [path] = re.findall(r"\.\./\.\./(crds/\S+)", (ROOT / "examples" / "pulumi" / "Pulumi.yaml").read_text())
    assert (ROOT / path).is_file()
