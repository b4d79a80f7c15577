"""`plimsoll render -f FILE`: exactly the objects that the operator would apply for a manifest.

For review before a change, and for people who want to know what a service is made of. Needs no cluster.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import yaml

from plimsoll.api import labels
from plimsoll.api.v1alpha1 import parse
from plimsoll.core.errors import InvalidSpec
from plimsoll.resources import objects
from plimsoll.resources.platform import EngineSettings, GatewaySettings, Platform

Object = dict[str, Any]

DEFAULTS = Platform(
    engine=EngineSettings(image="plimsoll/engine"),
    gateway=GatewaySettings(namespace="plimsoll-system", pod_selector={labels.COMPONENT: "gateway"}),
)


def run(arguments: argparse.Namespace) -> int:
    text = _read(arguments.filename)
    platform = DEFAULTS
    if arguments.config:
        platform = Platform.model_validate(yaml.safe_load(_read(arguments.config)))
    rendered = [obj for document in yaml.safe_load_all(text) if document for obj in render(document, platform)]
    yaml.safe_dump_all(rendered, sys.stdout, sort_keys=False)
    return 0


def _read(name: str) -> str:
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_text()
    except OSError as error:
        raise InvalidSpec((f"{name}: {error.strerror}",)) from error


def render(manifest: Object, platform: Platform) -> list[Object]:
    """The objects of one manifest as on a cluster where the service is new. Raises InvalidSpec."""
    if manifest.get("kind") != labels.KIND:
        raise InvalidSpec((f"kind: must be {labels.KIND}, not {manifest.get('kind')}",))
    meta = {"namespace": "default", "uid": "00000000-0000-0000-0000-000000000000", "generation": 1}
    parent = {**manifest, "metadata": {**meta, **manifest.get("metadata", {})}}
    service = parse(parent)
    made = objects.shared(service, parent, platform)
    for kind, tier in service.spec.tiers.items():
        kept = objects.revision(service, parent, kind, platform)
        template = objects.KeptTemplate(kept["metadata"]["name"], kept["data"])
        made += [kept, *objects.tier(service, parent, kind, template, tier.bounds[0])]
    return made
