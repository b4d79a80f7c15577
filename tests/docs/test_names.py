"""Fields and metrics that pages name are there."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from launcher import contract
from plimsoll.api import crd, reference_page
from tests.chart.rendering import ROOT
from tests.chart.test_monitoring import KNOWN, RECORDED
from tests.docs.test_snippets import pages

FIELD = re.compile(r"(?<![\w./-])((?:spec|status)\.[a-zA-Z]\w*(?:\.(?:\w+|\*))*)")
METRIC = re.compile(r"(?<![\w:/.-])((?:service:)?plimsoll_[a-z0-9_:]+)")
OTHERS = {"spec.replicas", "plimsoll_desired_replicas"}  # of a Deployment; what an adapter calls the advice
TIERS = r"^(spec\.targets|(?:spec|status)\.tiers)\.(?:\*|TIER|prefill|decode|serve)"


@cache
def fields() -> set[str]:
    return {path.replace("[]", "") for path, _ in reference_page._fields("", crd.schema())}


def metrics() -> set[str]:
    whole = {name.removesuffix("_bucket") for name in KNOWN}
    return {*whole, *KNOWN, *RECORDED, *contract.load({}).metrics.values()}


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_documented_field_exists(page: Path) -> None:
    named = {re.sub(TIERS, r"\1.TIER", path) for path in FIELD.findall(page.read_text())}
    assert sorted(named - fields() - OTHERS) == []


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_documented_metric_exists(page: Path) -> None:
    assert sorted(set(METRIC.findall(page.read_text())) - metrics() - OTHERS) == []
