"""Rules and dashboard ask for what exists, and each alert leads to a paragraph."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from plimsoll.adapters.engine_metrics import reader_of
from plimsoll.api.conditions import ConditionReason, ConditionType
from plimsoll.api.contract import engine_contract
from plimsoll.engines import launched
from plimsoll.gateway.errors import RejectionReason
from plimsoll.telemetry import gateway_metrics, operator_metrics
from simulated.metric_families import COUNTER_HELP, GAUGE_HELP, HISTOGRAM_HELP
from tests.chart.rendering import CHART, ROOT, Object, find, of_kind, render

RULES_FILE = CHART / "files" / "rules" / "plimsoll.yaml"
OPENCOST_FILE = CHART / "files" / "rules" / "opencost.yaml"
DASHBOARD_FILE = CHART / "files" / "dashboards" / "plimsoll.json"
UNIT_TESTS = Path(__file__).parent / "rules" / "plimsoll_test.yaml"
ALERTS_PAGE = ROOT / "docs" / "reference" / "alerts.md"

RULES: list[Object] = [
    rule
    for file in (RULES_FILE, OPENCOST_FILE)
    for group in yaml.safe_load(file.read_text())["groups"]
    for rule in group["rules"]
]
ALERTS = [rule for rule in RULES if "alert" in rule]
DASHBOARD: Object = json.loads(DASHBOARD_FILE.read_text())
PANELS: list[Object] = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]

# Labels that a scrape adds, as docs/tasks/monitor.md and the PodMonitors say, and the one that tells clusters apart.
TARGET_LABELS = {"cluster", "namespace", "pod"}
ENGINE_LABELS = {"service", "tier", "le"} | TARGET_LABELS
NAME = r"(?:plimsoll_|vllm:|service:plimsoll_)[a-z0-9_:]+"


def exposed(registry: CollectorRegistry) -> Iterator[tuple[str, set[str]]]:
    """Every name that can be asked for, with its labels."""
    for collector in registry._collector_to_names:
        labels = set(getattr(collector, "_labelnames", ())) | TARGET_LABELS
        for family in collector.describe():  # type: ignore[attr-defined]
            match family.type:
                case "counter":
                    yield f"{family.name}_total", labels
                case "histogram":
                    yield from ((f"{family.name}_{part}", labels | {"le"}) for part in ("bucket", "count", "sum"))
                case _:
                    yield family.name, labels


READ_METRICS = {name.removesuffix("_bucket") for name in reader_of(launched.METRICS).names_regex.split("|")}
VLLM_METRICS = {
    *(f"vllm:{name}" for name in (*GAUGE_HELP, *HISTOGRAM_HELP)),
    *(f"vllm:{name}_total" for name in COUNTER_HELP),
}  # those of a recorded page
KNOWN = dict([*exposed(gateway_metrics.GATEWAY), *exposed(operator_metrics.OPERATOR)])
RECORDED = {rule["record"]: {"service"} for rule in RULES if "record" in rule}


def labels_of(name: str) -> set[str] | None:
    """The labels of a metric, None of one that does not exist."""
    if name.startswith("vllm:"):
        base = re.sub("_(bucket|sum|count)$", "", name)
        return ENGINE_LABELS if base in READ_METRICS | VLLM_METRICS else None
    if name in engine_contract().metrics.values():
        return ENGINE_LABELS
    return KNOWN.get(name) or RECORDED.get(name)


def expressions() -> Iterator[tuple[str, str]]:
    for rule in RULES:
        yield rule.get("alert") or rule["record"], rule["expr"]
    for panel in PANELS:
        for target in panel["targets"]:
            yield f"{panel['title']} {target['refId']}", target["expr"]


@pytest.mark.parametrize(("where", "expr"), list(expressions()), ids=lambda value: value[:40])
def test_expression_uses_existing_metrics_and_labels(where: str, expr: str) -> None:
    requested = re.findall(rf"\b({NAME})(?:\{{([^}}]*)\}})?", expr)
    assert requested, where
    for name, matchers in requested:
        have = labels_of(name)
        assert have is not None, f"{name} does not exist"
        assert set(re.findall(r"([a-z_]+)(?:=~|!=|!~|=)", matchers)) <= have, f"{name} has only {have}"


def test_expression_conditions_and_reasons_exist() -> None:
    for where, expr in expressions():
        for kind in re.findall(r'\btype="([^"]+)"', expr):
            assert kind in {t.value for t in ConditionType}, where
        for reasons in re.findall(r'\breason=~?"([^"]+)"', expr):
            assert set(reasons.split("|")) <= {r.value for r in (*ConditionReason, *RejectionReason)}, where


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_alert_has_severity_annotations_and_runbook(alert: Object) -> None:
    assert alert["labels"]["severity"] in ("critical", "warning")
    assert set(alert["annotations"]) == {"summary", "description", "runbook_url"}
    page, _, anchor = alert["annotations"]["runbook_url"].partition("#")
    assert ROOT / page == ALERTS_PAGE
    assert anchor == alert["alert"].lower()
    paragraph = ALERTS_PAGE.read_text().partition(f"\n## {alert['alert']}\n")[2]
    assert paragraph.strip().startswith(f"`{alert['labels']['severity']}`:")


def test_alerts_page_and_unit_tests_cover_every_alert() -> None:
    names = [alert["alert"] for alert in ALERTS]
    assert re.findall(r"(?m)^## (.+)$", ALERTS_PAGE.read_text()) == names
    assert [name for name in names if name not in UNIT_TESTS.read_text()] == []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.get("alert") or rule["record"])
def test_rules_keep_clusters_apart(rule: Object) -> None:
    """One Prometheus may have the metrics of several clusters, with services of the same names."""
    groups = re.findall(r"\b(?:by|on) ?\(([^)]*)\)", rule["expr"])
    assert all(group.startswith("cluster, ") or group == "cluster" for group in groups), groups


def test_rules_tests_name_alerts_that_exist() -> None:
    text = (ROOT / "tests" / "chart" / "rules" / "plimsoll_test.yaml").read_text()
    requested = set(re.findall(r'alertname=~?\\?"([^"\\]+)', text)) | set(re.findall(r"alertname: (\w+)", text))
    names = [alert["alert"] for alert in ALERTS]
    assert len(requested) > 10
    assert [one for one in requested if not any(re.fullmatch(one, name) for name in names)] == []


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed; the cluster scenario has it")
def test_promtool_accepts_rules() -> None:
    for verb, path in (("check", RULES_FILE), ("check", OPENCOST_FILE), ("test", UNIT_TESTS)):
        done = subprocess.run(["promtool", verb, "rules", path], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_dashboard_ids_variables_and_refs_are_consistent() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    assert {v["name"] for v in DASHBOARD["templating"]["list"]} == {"datasource", "namespace", "service"}
    for panel in PANELS:
        assert panel["description"], panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs) > 0
    used = {name for _, expr in expressions() for name in re.findall(r"\$([a-z_]\w*)", expr)}
    assert used == {"service", "__rate_interval"}


@pytest.mark.parametrize(
    "metric",
    [
        "vllm:request_queue_time_seconds_bucket",
        "vllm:request_prefill_time_seconds_bucket",
        "vllm:request_decode_time_seconds_bucket",
        "vllm:prefix_cache_hits_total",
        "vllm:num_preemptions_total",
        "vllm:external_prefix_cache_hits_total",
        "vllm:spec_decode_num_accepted_tokens_total",
        "plimsoll_slo_attainment_ratio",
        "plimsoll_gateway_adapter_requests_total",
        "plimsoll_gateway_prefix_tokens_total",
        "plimsoll_gateway_ttft_by_prompt_seconds_bucket",
        "plimsoll_gateway_tpot_by_output_seconds_bucket",
        "plimsoll_gateway_queue_seconds_sum",
        "vllm:nixl_xfer_time_seconds_sum",
        "service:plimsoll_goodput_tokens_per_gpu_second:rate5m",
        "service:plimsoll_tenant_cost_per_hour:avg1h",
    ],
)
def test_dashboard_shows_phases_caches_and_goodput(metric: str) -> None:
    assert any(metric in target["expr"] for panel in PANELS for target in panel["targets"])


def test_dashboard_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert max(x for x, _ in cells) < 24
        assert not cells & taken, panel["title"]
        taken |= cells


def test_rules_and_dashboard_are_rendered_on_request() -> None:
    assert of_kind(render(), "PrometheusRule") == []
    configs = [o["metadata"]["name"] for o in of_kind(render(), "ConfigMap")]
    assert configs == ["plimsoll-operator", "plimsoll-service-namespaces"]
    rules: Object = {"enabled": True, "labels": {"release": "prometheus"}, "docsUrl": "https://docs.example/llm/"}
    objects = render({"monitoring": {"prometheusRule": rules, "dashboard": {"enabled": True}}})
    rule = find(objects, "PrometheusRule")
    assert rule["metadata"]["labels"]["release"] == "prometheus"
    text = json.dumps(yaml.safe_load(RULES_FILE.read_text())).replace('"docs/', '"https://docs.example/llm/')
    assert rule["spec"] == json.loads(text)
    board = find(objects, "ConfigMap", "plimsoll-dashboard")
    assert board["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert json.loads(board["data"]["plimsoll.json"]) == DASHBOARD


def test_opencost_names_are_recorded_on_request() -> None:
    (rule,) = of_kind(
        render({"monitoring": {"prometheusRule": {"enabled": True, "openCostNames": True}}}), "PrometheusRule"
    )
    groups = [group for file in (RULES_FILE, OPENCOST_FILE) for group in yaml.safe_load(file.read_text())["groups"]]
    assert [group["name"] for group in rule["spec"]["groups"]] == [group["name"] for group in groups]
    assert rule["spec"]["groups"][-1] == groups[-1]
    assert [one["record"] for one in groups[-1]["rules"]] == [
        "opencost_inference_total_cost",
        "opencost_inference_cost_per_million_tokens",
    ]


def test_engine_pod_monitor_adds_service_and_tier_labels() -> None:
    objects = render({"metrics": {"podMonitor": {"enabled": True}}})
    monitors: dict[str, Any] = {o["metadata"]["name"]: o["spec"] for o in of_kind(objects, "PodMonitor")}
    (engines,) = monitors["plimsoll-engines"]["podMetricsEndpoints"]
    assert [r["targetLabel"] for r in engines["relabelings"]] == ["service", "tier"]
    assert "relabelings" not in monitors["plimsoll-gateway"]["podMetricsEndpoints"][0]


def test_operator_prometheus_url_is_set_on_request() -> None:
    def environment_of(values: Object) -> Object:
        spec = find(render(values), "Deployment", "plimsoll-operator")["spec"]["template"]["spec"]
        return {e["name"]: e.get("value") for e in spec["containers"][0]["env"]}

    assert "PLIMSOLL_PROMETHEUS_URL" not in environment_of({})
    url = "http://prometheus.monitoring:9090"
    assert environment_of({"monitoring": {"prometheus": {"url": url}}})["PLIMSOLL_PROMETHEUS_URL"] == url
