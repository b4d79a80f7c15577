"""YAML of the task pages, so that scenarios run what the documentation says."""

from __future__ import annotations

import re
import textwrap
from typing import Any

import yaml

from e2e.cluster.settings import ROOT
from e2e.lib.kube import Object


def documented(page: str, key: str) -> Object:
    """The one YAML block of a task page that is of this kind, or has this key."""
    text = (ROOT / "docs" / "tasks" / page).read_text()
    blocks: list[Any] = [
        yaml.safe_load(textwrap.dedent(one)) for one in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    ]
    [found] = [one for one in blocks if key == one.get("kind") or key in one]
    return dict(found)
