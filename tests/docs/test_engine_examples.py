"""The examples for servers of other projects: the pod's variables that they name exist, and their metrics are read.

The pages are in `tests/engines/pages`, whose README says where each comes from.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from plimsoll.adapters.engine_metrics import parse_metrics
from plimsoll.adapters.engine_of_pod import metrics_address
from plimsoll.api.v1alpha1 import parse
from plimsoll.engines.engine import Signal
from plimsoll.resources import engine_pod
from tests import builders
from tests.api.manifests import ENGINE_EXAMPLES, Manifest, edited, engine_examples
from tests.chart.rendering import ROOT

PAGES = ROOT / "tests" / "engines" / "pages"
TASK = (ROOT / "docs" / "tasks" / "other-engines.md").read_text()
WITHOUT_METRICS = {"ollama"}
OWN_SERVERS = {name for name, one in engine_examples().items() if one["spec"]["engine"]["runtime"] == "openai"}


def pod_of(name: str) -> Manifest:
    """What Plimsoll makes of an example."""
    service = parse(edited(engine_examples()[name], {"metadata.namespace": "team"}))
    return engine_pod.pod_template(service, "serve", builders.PLATFORM)


def test_task_page_links_each_example() -> None:
    linked = set(re.findall(r"\.\./\.\./examples/engines/([\w-]+)\.yaml", TASK))
    assert linked == set(engine_examples())


@pytest.mark.parametrize("name", engine_examples())
def test_example_is_named_after_its_file(name: str) -> None:
    assert engine_examples()[name]["metadata"]["name"] == name


@pytest.mark.parametrize("name", engine_examples())
def test_example_names_an_existing_json_schema(name: str) -> None:
    first = (ENGINE_EXAMPLES / f"{name}.yaml").read_text().splitlines()[0]
    path = Path(first.removeprefix("# yaml-language-server: $schema="))
    assert (ENGINE_EXAMPLES / path).is_file()


@pytest.mark.parametrize("name", engine_examples())
def test_variables_of_the_example_exist_before_their_use(name: str) -> None:
    container = pod_of(name)["spec"]["containers"][0]
    known: set[str] = set()
    for entry in container["env"]:
        assert set(re.findall(r"\$\((\w+)\)", entry.get("value", ""))) <= known, entry
        known.add(entry["name"])
    words = [*container.get("command", ()), *container.get("args", ())]
    assert {variable for word in words for variable in re.findall(r"\$\((\w+)\)", word)} <= known


@pytest.mark.parametrize("name", sorted(OWN_SERVERS - {"ollama"}))
def test_server_gets_the_model_name_of_clients(name: str) -> None:
    """Ollama's name is that of the pulled model."""
    container, model = pod_of(name)["spec"]["containers"][0], engine_examples()[name]["spec"]["model"]["name"]
    assert model in json.dumps([container.get("args"), container["env"]])


@pytest.mark.parametrize("name", sorted(OWN_SERVERS - WITHOUT_METRICS))
def test_every_metric_of_the_example_is_on_its_page(name: str) -> None:
    address = metrics_address(pod_of(name))
    assert address is not None
    found = parse_metrics((PAGES / f"{name}.txt").read_bytes(), "pod", 1.0, address.names)
    assert (found.running, found.waiting, found.generated_tokens) == (3.0, 2.0, 16.0)
    for signal, _ in address.names.signals:
        assert getattr(found, signal.value) is not None, signal
    assert Signal.TTFT in dict(address.names.signals)


@pytest.mark.parametrize("name", WITHOUT_METRICS)
def test_example_without_metrics_has_an_slo(name: str) -> None:
    """What the gateway measures is all there is to scale by."""
    assert metrics_address(pod_of(name)) is None
    assert "slo" in engine_examples()[name]["spec"]
