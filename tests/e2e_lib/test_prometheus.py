"""Queries go out as Grafana would send them, and what Prometheus says of them comes back in its words."""

from __future__ import annotations

import json
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest

from e2e.lib.prometheus import PanelQuery, PrometheusClient, discovered, queries


def requested_query(path: str) -> str:
    return parse_qs(urlsplit(path).query)["query"][0]


def test_queries_substitute_variables_and_skip_rows(tmp_path: Path) -> None:
    expr = 'sum(rate(a_total{service="$service"}[$__rate_interval]))'
    board = tmp_path / "board.json"
    panels = [{"title": "Row"}, {"title": "A", "targets": [{"refId": "A", "expr": expr}, {"refId": "B", "expr": "up"}]}]
    board.write_text(json.dumps({"panels": panels}))
    assert list(queries(board, "team/chat")) == [
        PanelQuery("A", "A", 'sum(rate(a_total{service="team/chat"}[1m]))'),
        PanelQuery("A", "B", "up"),
    ]


def test_query_result_omits_nan_samples() -> None:
    def answer(path: str) -> httpx.Response:
        assert requested_query(path) == 'a{b="c d&e"}'
        result = [{"metric": {}, "value": [1.0, "NaN"]}, {"metric": {"x": "y"}, "value": [1.0, "2"]}]
        return httpx.Response(200, json={"status": "success", "data": {"result": result}})

    assert [s["metric"] for s in PrometheusClient(answer).query('a{b="c d&e"}')] == [{"x": "y"}]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (httpx.Response(400, json={"status": "error", "error": "parse error: unclosed"}), "400 parse error: unclosed"),
        (httpx.Response(503, text="no endpoints available"), "503 no endpoints available"),
    ],
)
def test_query_error_raises_with_its_message(answer: httpx.Response, words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        PrometheusClient(lambda path: answer).query("sum(")


def test_pod_targets_have_discovery_labels() -> None:
    ports = [{"name": "launcher", "containerPort": 8001}, {"containerPort": 9}]
    pod = {
        "metadata": {"name": "p", "namespace": "team", "labels": {"plimsoll.dev/role": "serve"}},
        "spec": {"containers": [{"ports": ports}, {}], "initContainers": [{"ports": [{"containerPort": 7}]}]},
        "status": {"podIP": "10.0.0.1"},
    }
    found = discovered([pod])
    assert [target["targets"] for target in found] == [["10.0.0.1:8001"], ["10.0.0.1:9"], ["10.0.0.1:7"]]
    assert found[0]["labels"] == {
        "__meta_kubernetes_namespace": "team",
        "__meta_kubernetes_pod_name": "p",
        "__meta_kubernetes_pod_label_plimsoll_dev_role": "serve",
        "__meta_kubernetes_pod_container_port_name": "launcher",
    }
