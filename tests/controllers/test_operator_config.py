"""The operator's configuration: what is wrong is told with its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from plimsoll.controllers.operator_config import InvalidConfig, load_config

GOOD = """
engine: {image: "e:1", imagePullPolicy: Always, defaults: {args: [--x]}}
gateway: {namespace: plimsoll-system, podSelector: {a: b}}
metrics: {from: [{podSelector: {}}]}
networkPolicy: {enabled: false}
watchNamespaces: [team]
"""


def test_load_valid_file_reads_settings(tmp_path: Path) -> None:
    path = tmp_path / "operator.yaml"
    path.write_text(GOOD)
    found = load_config({"PLIMSOLL_CONFIG": str(path), "POD_NAME": "p", "POD_NAMESPACE": "n"})
    assert (found.identity, found.namespace) == ("p", "n")
    assert found.platform.watch_namespaces == ("team",)
    assert found.platform.engine.defaults.args == ("--x",)
    assert found.platform.metrics.peers == ({"podSelector": {}},)
    assert found.platform.gateway.url == "http://plimsoll-gateway.plimsoll-system.svc/v1"


@pytest.mark.parametrize(
    ("text", "words"),
    [("", "engine"), ("engine: {}", "image"), ("a: [", "line 1"), (GOOD + "typo: 1", "typo")],
)
def test_load_invalid_file_names_path_and_error(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "operator.yaml"
    path.write_text(text)
    with pytest.raises(InvalidConfig, match=words) as caught:
        load_config({"PLIMSOLL_CONFIG": str(path)})
    assert str(path) in str(caught.value)


def test_load_missing_file_raises(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="PLIMSOLL_CONFIG"):
        load_config({"PLIMSOLL_CONFIG": str(tmp_path / "none")})
