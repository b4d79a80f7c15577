"""The source of the Prometheus adapter: its module as published, with its own lock file."""

from __future__ import annotations

from pathlib import Path

from e2e.cluster.go_modules import downloaded

MODULE = "sigs.k8s.io/prometheus-adapter@v0.12.0"


def source() -> Path:
    """The folder to build in."""
    return downloaded(MODULE)
