"""Every field of every example, broken in every way that its kind allows."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.api.manifests import Manifest, Place, put

# Below these the schema takes anything, or any key.
FREE = ("affinity", "volumes", "topologySpreadConstraints")
MAPS = ("nodeSelector", "labels", "annotations", "requests", "limits")
NUMBER_OR_TEXT = ("maxSurge", "maxUnavailable", "cpu", "memory", "min", "max", "gpuHour", "requestsPerSecond")


@dataclass(frozen=True)
class Mutation:
    """An example with one field broken; `at` leads to the field."""

    example: str
    at: Place
    manifest: Manifest

    @property
    def path(self) -> str:
        """The field as `parse` and the API server's schema write it."""
        return _written(self.at)


def mutations(example: str, manifest: Manifest) -> Iterator[Mutation]:
    """The manifest with one wrong value, for each field of its spec and each kind of wrong value."""
    for at, value in _nodes(("spec",), manifest["spec"]):
        for wrong in _wrong(at, value):
            broken = copy.deepcopy(manifest)
            put(broken, at, wrong)
            yield Mutation(example, at, broken)
        if isinstance(value, dict) and at[-1] not in (*MAPS, *FREE):
            broken = copy.deepcopy(manifest)
            put(broken, (*at, "surprise"), 1)
            yield Mutation(example, (*at, "surprise"), broken)


def _nodes(at: Place, value: Any) -> Iterator[tuple[Place, Any]]:
    """Every value, from the top down, but nothing below what is passed through."""
    yield at, value
    if at[-1] in FREE:
        return
    if isinstance(value, dict):
        for key, child in value.items():
            yield from _nodes((*at, key), child)
    elif isinstance(value, list):
        for index, child in enumerate(value):
            yield from _nodes((*at, index), child)


def _wrong(at: Place, value: Any) -> list[Any]:
    """Values of other kinds than this field's."""
    if at[-1] in FREE or isinstance(value, dict | list):
        return ["surprise", 7, [] if isinstance(value, dict) else {}]
    if at[-1] in NUMBER_OR_TEXT:
        return [{}, [], 1.5, True]
    if isinstance(value, bool):
        return ["true", 1, {}]
    return [{}, [], 7, True] if isinstance(value, str) else [{}, [], "7", 1.5, True]


def _written(at: Place) -> str:
    steps = [f"[{step}]" if isinstance(step, int) or "/" in step or "." in step else f".{step}" for step in at]
    return "".join(steps).removeprefix(".")
