"""The next version of the InferenceService API, v1beta1: prepared, and in no release's CRD.

Problem: a version that others rely on can no longer change in place. The first step to it, two versions of one stored
object, must lose no field in either direction.

Idea: v1beta1 starts with the fields of v1alpha1. The API server then converts by the `apiVersion` alone, and needs no
webhook. A later change of a field in v1beta1 changes `convert` too, and the tests compare it with the API server.

    python -m plimsoll.api.next_version           print the CRD with both versions, v1beta1 unserved
    python -m plimsoll.api.next_version --serve   the same with v1beta1 served
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import Any, Final

from plimsoll.api import crd, labels

NEXT_VERSION: Final = "v1beta1"
_API_VERSIONS: Final = {version: f"{labels.GROUP}/{version}" for version in (labels.VERSION, NEXT_VERSION)}


def definition(*, serve: bool = False) -> dict[str, Any]:
    """Return the CustomResourceDefinition with both versions. v1alpha1 stays the version of stored objects."""
    single = crd.definition()
    (version,) = single["spec"]["versions"]
    following = {**version, "name": NEXT_VERSION, "served": serve, "storage": False}
    return {**single, "spec": {**single["spec"], "versions": [version, following], "conversion": {"strategy": "None"}}}


def convert(manifest: Mapping[str, Any], version: str) -> dict[str, Any]:
    """Return a manifest of either version in another. Raises ValueError for a version that does not exist."""
    found = manifest.get("apiVersion")
    if found not in _API_VERSIONS.values():
        raise ValueError(f"apiVersion is {found!r}: use one of {', '.join(_API_VERSIONS.values())}")
    if version not in _API_VERSIONS:
        raise ValueError(f"version is {version!r}: use one of {', '.join(_API_VERSIONS)}")
    return {**manifest, "apiVersion": _API_VERSIONS[version]}


def main(arguments: list[str] | None = None) -> int:
    """Print the definition."""
    parser = argparse.ArgumentParser(
        prog="python -m plimsoll.api.next_version", description=str(__doc__).splitlines()[0]
    )
    parser.add_argument("--serve", action="store_true", help=f"serve {NEXT_VERSION}, too")
    sys.stdout.write(crd.render(definition(serve=parser.parse_args(arguments).serve)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
