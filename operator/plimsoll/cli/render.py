"""`plimsoll render -f FILE`: prints the objects that the operator would apply for a manifest.

It is for reviews before a change and needs no cluster.
"""

from __future__ import annotations

import argparse
from typing import Any

import yaml
from pydantic import ValidationError

from plimsoll.api import labels
from plimsoll.api.v1alpha1 import parse
from plimsoll.api.v1alpha1.validation_messages import format_errors
from plimsoll.cli.manifests import load_documents
from plimsoll.cli.output_files import print_text
from plimsoll.core.errors import InvalidSpec
from plimsoll.resources import objects
from plimsoll.resources.platform_config import EngineSettings, GatewaySettings, PlatformConfig

KubeObject = dict[str, Any]

DEFAULT_PLATFORM = PlatformConfig(
    engine=EngineSettings(image="plimsoll/engine"),
    gateway=GatewaySettings(namespace="plimsoll-system", pod_selector={labels.COMPONENT: "gateway"}),
)


def run(arguments: argparse.Namespace) -> int:
    platform = DEFAULT_PLATFORM if not arguments.config else _load_platform(arguments.config)
    rendered: list[KubeObject] = []
    for number, document in enumerate(documents := load_documents(arguments.filename), 1):
        try:
            rendered += render_manifest(document, platform)
        except InvalidSpec as error:
            place = f"document {number}: " if len(documents) > 1 else ""
            raise InvalidSpec(tuple(f"{place}{problem}" for problem in error.problems)) from None
    print_text(yaml.safe_dump_all(rendered, sort_keys=False) or "# no objects: the engines of spec.targets exist\n")
    return 0


def _load_platform(path: str) -> PlatformConfig:
    loaded = load_documents(path)
    try:
        return PlatformConfig.model_validate(loaded[0] if len(loaded) == 1 else loaded)
    except ValidationError as error:
        raise InvalidSpec(tuple(f"{path}: {line}" for line in format_errors(error))) from None


def render_manifest(manifest: Any, platform: PlatformConfig) -> list[KubeObject]:
    """Return the objects of one manifest, as for a new service. Raises InvalidSpec."""
    kind = manifest.get("kind") if isinstance(manifest, dict) else None
    if kind != labels.KIND:
        raise InvalidSpec((f"kind: must be {labels.KIND}, not {kind}",))
    metadata = manifest.get("metadata")
    if not isinstance(metadata, dict):
        raise InvalidSpec(("metadata: must contain the name of the service",))
    meta = {"namespace": "default", "uid": "00000000-0000-0000-0000-000000000000", "generation": 1}
    parent = {**manifest, "metadata": {**meta, **metadata}}
    service = parse(parent, platform.engine.gpu_resource)
    rendered = objects.shared_objects(service, parent, platform)
    for kind, tier in service.spec.tiers.items():
        revision = objects.template_revision(service, parent, kind, platform)
        generation = objects.template_generation(revision)
        template = objects.StoredTemplate(revision["metadata"]["name"], revision["data"], generation)
        rendered += [revision, *objects.tier_objects(service, parent, kind, template, tier.replica_bounds[0])]
    return rendered
