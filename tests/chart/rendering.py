"""Renders the chart with Helm, as a user's values would, and finds objects in what comes out.

python -m tests.chart.rendering > tests/chart/default.yaml      after an intended change of the default rendering
"""

from __future__ import annotations

import base64
import functools
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

Object = dict[str, Any]

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "plimsoll"
SNAPSHOT = Path(__file__).with_name("default.yaml")
NAMESPACE = "plimsoll-system"

# Everything that is off or absent by default, on: what a test needs to see the effect of the values below it.
EVERYTHING: Object = {
    "operator": {
        "replicas": 2,
        "recommendations": {"enabled": True, "from": [{"podSelector": {"matchLabels": {"reader": "x"}}}]},
        "kedaScaler": {"enabled": True, "tls": {"secretName": "their-scaler"}},
    },
    "internalTls": {"secretName": "their-internal"},
    "networkPolicy": {"clients": [{"podSelector": {}}], "egress": {"enabled": True}},
    "metrics": {"podMonitor": {"enabled": True}},
    "telemetry": {"traces": {"endpoint": "http://collector.example:4317"}},
    "monitoring": {"prometheusRule": {"enabled": True}, "dashboard": {"enabled": True}},
    "webhook": {
        "enabled": True,
        "certificate": {"secretName": "their-certificate", "caBundle": "-----BEGIN CERTIFICATE-----\ntheirs"},
    },
    "gateway": {
        "service": {"type": "LoadBalancer"},
        "autoscaling": {"maxReplicas": 4},
        "tls": {"secretName": "their-door"},
        "endpointPicker": {
            "enabled": True,
            "from": [{"podSelector": {"matchLabels": {"gateway": "x"}}}],
            "tls": {"secretName": "their-picker"},
        },
        "ingress": {"enabled": True},
        "httpRoute": {"enabled": True, "parentRefs": [{"name": "front"}]},
    },
}


MIN_KUBERNETES = "1.31.0"  # as Chart.yaml promises


class RenderError(Exception):
    """Helm would not render: the message is what it told the user."""


@functools.cache
def helm() -> str:
    """Helm as the cluster scripts build it, or the one on PATH. Raises FileNotFoundError."""
    cache = Path(os.environ.get("PLIMSOLL_CACHE", Path.home() / ".cache" / "plimsoll"))
    own = cache / "cluster" / "bin" / "helm"
    found = os.environ.get("HELM") or (str(own) if own.exists() else shutil.which("helm"))
    if not found:
        raise FileNotFoundError(f"no helm in {own.parent} nor on PATH: run `make setup`, which gets it, and try again")
    return found


def render(values: Mapping[str, Any] | None = None, *options: str) -> list[Object]:
    """All objects of the chart under these values, the caller's to change. Raises RenderError."""
    objects: list[Object] = pickle.loads(_render(json.dumps(values or {}), options))
    return objects


def render_text(values: Mapping[str, Any]) -> str:
    """The chart as Helm renders it now, with what each rendering draws by chance. Raises RenderError."""
    return _run("template", json.dumps(values), "--kube-version", MIN_KUBERNETES)


@functools.cache
def _render(values: str, options: tuple[str, ...]) -> bytes:
    version = () if "--kube-version" in options else ("--kube-version", MIN_KUBERNETES)
    documents = re.split(r"^---$", _run("template", values, *version, *options), flags=re.MULTILINE)
    return pickle.dumps([found for found in map(_parse, documents) if found])


@functools.cache
def _parse(text: str) -> Object | None:
    """The object without what each rendering draws by chance; most documents are the same in all renderings."""
    document: Object | None = yaml.load(text, Loader=yaml.CSafeLoader)
    if not document:
        return None
    if document["kind"] == "Secret" and document["metadata"]["name"].endswith("-gateway-peers"):
        document["data"] = {key: f"{len(base64.b64decode(text))} bytes" for key, text in document["data"].items()}
    return document


def _run(verb: str, values: str, *options: str) -> str:
    name = () if "--name-template" in options else ("plimsoll",)
    command = [helm(), verb, *name, str(CHART), "--namespace", NAMESPACE, "--values", "-", *options]
    result = subprocess.run(command, input=values, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise RenderError(result.stderr)
    return result.stdout


def notes(values: Mapping[str, Any] | None = None) -> str:
    """What the user reads after the installation. Raises RenderError."""
    return _run("install", json.dumps(values or {}), "--dry-run=client").partition("\nNOTES:\n")[2]


def find(objects: Iterable[Object], kind: str, name: str | None = None) -> Object:
    """The one object of a kind (and a name). Raises LookupError."""
    found = of_kind(objects, kind, name)
    if len(found) != 1:
        raise LookupError(f"{len(found)} objects are {kind} {name or ''}")
    return found[0]


def of_kind(objects: Iterable[Object], kind: str, name: str | None = None) -> list[Object]:
    return [o for o in objects if o["kind"] == kind and name in (None, o["metadata"]["name"])]


def pod_specs(objects: Iterable[Object]) -> dict[str, Object]:
    """The pod specs of all workloads, by name."""
    templates = {o["metadata"]["name"]: o["spec"]["template"]["spec"] for o in of_kind(objects, "Deployment")}
    return templates | {o["metadata"]["name"]: o["spec"] for o in of_kind(objects, "Pod")}


def containers(spec: Object) -> list[Object]:
    return [*spec.get("initContainers", []), *spec["containers"]]


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> Object:
    """Values files as Helm merges them: maps by key, all else replaced."""
    out = dict(base)
    for key, value in over.items():
        old = out.get(key)
        out[key] = merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return out


def snapshot() -> str:
    """The default rendering in a stable order. The definition's schema has tests of its own."""
    objects = []
    for o in render():
        is_definition = o["kind"] == "CustomResourceDefinition"
        objects.append({k: v for k, v in o.items() if not (is_definition and k == "spec")})
    objects.sort(key=lambda o: (o["kind"], o["metadata"]["name"]))
    return yaml.safe_dump_all(objects, width=120)


if __name__ == "__main__":
    sys.stdout.write(snapshot())
