"""`plimsoll render -f FILE`: exactly the objects that the operator would apply for a manifest.

For review before a change, and for people who want to know what a service is made of. Needs no cluster.
"""

from __future__ import annotations

import argparse
from typing import Any

import yaml
from pydantic import ValidationError

from plimsoll.api import labels
from plimsoll.api.v1alpha1 import parse
from plimsoll.api.v1alpha1.problems import sentences
from plimsoll.cli.files import say
from plimsoll.cli.manifests import documents
from plimsoll.core.errors import InvalidSpec
from plimsoll.resources import objects
from plimsoll.resources.platform import EngineSettings, GatewaySettings, Platform

Object = dict[str, Any]

DEFAULTS = Platform(
    engine=EngineSettings(image="plimsoll/engine"),
    gateway=GatewaySettings(namespace="plimsoll-system", pod_selector={labels.COMPONENT: "gateway"}),
)


def run(arguments: argparse.Namespace) -> int:
    platform = DEFAULTS if not arguments.config else _platform(arguments.config)
    rendered = [obj for document in documents(arguments.filename) for obj in render(document, platform)]
    say(yaml.safe_dump_all(rendered, sort_keys=False))
    return 0


def _platform(path: str) -> Platform:
    found = documents(path)
    try:
        return Platform.model_validate(found[0] if len(found) == 1 else found)
    except ValidationError as error:
        raise InvalidSpec(tuple(f"{path}: {line}" for line in sentences(error))) from None


def render(manifest: Any, platform: Platform) -> list[Object]:
    """The objects of one manifest as on a cluster where the service is new. Raises InvalidSpec."""
    kind = manifest.get("kind") if isinstance(manifest, dict) else None
    if kind != labels.KIND:
        raise InvalidSpec((f"kind: must be {labels.KIND}, not {kind}",))
    metadata = manifest.get("metadata")
    if not isinstance(metadata, dict):
        raise InvalidSpec(("metadata: must hold the service's name",))
    meta = {"namespace": "default", "uid": "00000000-0000-0000-0000-000000000000", "generation": 1}
    parent = {**manifest, "metadata": {**meta, **metadata}}
    service = parse(parent)
    made = objects.shared(service, parent, platform)
    for kind, tier in service.spec.tiers.items():
        kept = objects.revision(service, parent, kind, platform)
        template = objects.KeptTemplate(kept["metadata"]["name"], kept["data"])
        made += [kept, *objects.tier(service, parent, kind, template, tier.bounds[0])]
    return made
