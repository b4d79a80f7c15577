"""Manifests to start from, and how to change one place in them."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import yaml

Manifest = dict[str, Any]
Place = tuple[str | int, ...]

EXAMPLES = Path(__file__).parents[2] / "crds" / "examples"
ENGINE_EXAMPLES = Path(__file__).parents[2] / "examples" / "engines"
ABSENT = object()  # as a value: take the field away


def service(**edits: Any) -> Manifest:
    """A prefill and a decode tier; `edits` by dotted path, given as a dict with `**`."""
    return edited(_head({"prefill": {}, "decode": {}}), edits)


def aggregated(**edits: Any) -> Manifest:
    """One aggregated tier."""
    return edited(_head({"serve": {}}), edits)


def adopted(**edits: Any) -> Manifest:
    """Engines of a Deployment that exists."""
    ref = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "llm"}
    manifest = _head({})
    del manifest["spec"]["tiers"]
    manifest["spec"] |= {"slo": {"ttft": "1s"}, "targets": {"serve": {"scaleTargetRef": ref, "maxReplicas": 4}}}
    return edited(manifest, edits)


def adopted_pair(**edits: Any) -> Manifest:
    """Prefill and decode engines of two Deployments that exist."""
    manifest = adopted()
    manifest["spec"]["targets"] = {
        role: {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": f"llm-{role}"},
            "maxReplicas": 4,
        }
        for role in ("prefill", "decode")
    }
    return edited(manifest, edits)


def examples() -> dict[str, Manifest]:
    """The manifests that ship, by file name."""
    return _manifests(EXAMPLES)


def engine_examples() -> dict[str, Manifest]:
    """The manifests for servers of other projects, by file name."""
    return _manifests(ENGINE_EXAMPLES)


def _manifests(folder: Path) -> dict[str, Manifest]:
    return {path.stem: yaml.safe_load(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.yaml"))}


def edited(manifest: Manifest, edits: dict[str, Any]) -> Manifest:
    """A copy with other values at some paths such as `spec.engine.env[0].name`; missing objects are made."""
    changed = copy.deepcopy(manifest)
    for path, value in edits.items():
        put(changed, place(path), copy.deepcopy(value) if value is not ABSENT else ABSENT)
    return changed


def place(path: str) -> Place:
    """The steps of a path."""
    return tuple(int(step) if step.isdigit() else step for step in re.findall(r"[^.\[\]]+", path))


def put(manifest: Manifest, steps: Place, value: Any) -> None:
    """Set (or, with ABSENT, remove) what stands at some steps; changes `manifest`."""
    node: Any = manifest
    for step in steps[:-1]:
        node = node.setdefault(step, {}) if isinstance(node, dict) else node[step]
    if value is ABSENT:
        del node[steps[-1]]
    else:
        node[steps[-1]] = value


def _head(tiers: Manifest) -> Manifest:
    return {
        "apiVersion": "plimsoll.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": "chat", "namespace": "default"},
        "spec": {"model": {"uri": "hf://Qwen/Qwen3-8B"}, "tiers": tiers},
    }
