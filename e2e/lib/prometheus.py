"""A Prometheus as scenarios ask it: queries, targets, rules, and the queries of a Grafana dashboard.

Problem: a query that Grafana or a rule would send must be sent just so, and what Prometheus finds wrong with it must be
read. Idea: one function that gets a path (through the API server's pod proxy, or directly), and Prometheus' own words
in every error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode

import httpx

from e2e.lib.kube import Object

RATE_INTERVAL = "1m"  # what Grafana makes of $__rate_interval at a scrape interval of 15 s


@dataclass(frozen=True)
class PanelQuery:
    """One target of a panel, its variables filled in."""

    panel: str
    ref: str
    expr: str


def queries(dashboard: Path, service: str) -> Iterator[PanelQuery]:
    """Every query of a dashboard for one service (NAMESPACE/NAME)."""
    for panel in json.loads(dashboard.read_text())["panels"]:
        for target in panel.get("targets", ()):
            expr = target["expr"].replace("$__rate_interval", RATE_INTERVAL).replace("$service", service)
            yield PanelQuery(panel["title"], target["refId"], expr)


def discovered(pods: Iterable[Object]) -> list[Object]:
    """What `kubernetes_sd_configs: [{role: pod}]` finds of these pods, as `static_configs`.

    Debian builds Prometheus without it. Labels are named as it names them, so that relabelling is the user's own.
    """
    found = []
    for pod in pods:
        meta, spec = pod["metadata"], pod["spec"]
        known = {"__meta_kubernetes_namespace": meta["namespace"], "__meta_kubernetes_pod_name": meta["name"]}
        for key, value in meta.get("labels", {}).items():
            known[f"__meta_kubernetes_pod_label_{re.sub('[^a-zA-Z0-9_]', '_', key)}"] = value
        for container in [*spec["containers"], *spec.get("initContainers", ())]:
            for port in container.get("ports", ()):
                name = {"__meta_kubernetes_pod_container_port_name": port.get("name", "")}
                found.append({"targets": [f"{pod['status']['podIP']}:{port['containerPort']}"], "labels": known | name})
    return found


class PrometheusClient:
    """Raises AssertionError with Prometheus' own words where it says no: in a scenario that is a finding."""

    def __init__(self, get: Callable[[str], httpx.Response]) -> None:
        self._get = get

    def query(self, expr: str) -> list[Object]:
        """The instant vector of an expression, without samples that are no number (0 divided by 0)."""
        found = self._data(f"/api/v1/query?{urlencode({'query': expr})}")["result"]
        return [sample for sample in found if sample["value"][1] != "NaN"]

    def samples(self, selector: str) -> list[float]:
        """The values of a range selector as they were scraped, all series together."""
        found = self._data(f"/api/v1/query?{urlencode({'query': selector})}")["result"]
        return [float(value) for series in found for _, value in series["values"]]

    def targets(self) -> list[Object]:
        """What is scraped: `labels`, `health`, `lastError`."""
        return list(self._data("/api/v1/targets?state=active")["activeTargets"])

    def rules(self) -> list[Object]:
        """All rules with their `health` and `lastError`."""
        return [rule for group in self._data("/api/v1/rules")["groups"] for rule in group["rules"]]

    def _data(self, path: str) -> Object:
        response = self._get(path)
        try:
            error_text = response.json()
        except ValueError:
            error_text = {}
        assert error_text.get("status") == "success", (
            f"{path}: {response.status_code} {error_text.get('error') or response.text[:300]}"
        )
        return dict(error_text["data"])
