"""The core of the law is readable in one sitting."""

from __future__ import annotations

import re
from pathlib import Path

import plimsoll

CORE = Path(plimsoll.__file__).parent / "core"
ARCHITECTURE = Path(__file__).parents[2] / "docs/architecture.md"
MAX_LINES = 1500


def test_core_of_the_law_has_at_most_1500_lines() -> None:
    text = ARCHITECTURE.read_text().partition("From demand to replicas")[2].partition("\n\n")[0]
    modules = re.findall(r"`([a-z_]+/[a-z_]+\.py)`", text)
    assert len(modules) >= 6
    assert sum(len((CORE / module).read_text().splitlines()) for module in modules) <= MAX_LINES
