"""Each term of the glossary has a symbol, a unit, a formula and a module, and what it names in a module is there."""

from __future__ import annotations

import re
from typing import Final

import pytest

from tests.chart.rendering import ROOT

PARTS: Final = ("Symbol", "Unit", "Formula", "Module")
OWNED_TERMS: Final = (  # words that only this project has
    "SLO capacity", "Goodput knee", "Start-up time model", "Capacity correction",
    "Retry reservation", "Standby replicas", "Scaling decision",
)  # fmt: skip
TEXT: Final = (ROOT / "docs/glossary.md").read_text()
ENTRIES: Final = {
    entry.partition("\n")[0]: entry.partition("\n")[2] for entry in re.split(r"^### ", TEXT, flags=re.MULTILINE)[1:]
}


def _source(module: str) -> str:
    folder = ROOT if module.startswith("engine-image/") else ROOT / "operator/plimsoll"
    return (folder / module).read_text()


@pytest.mark.parametrize("term", OWNED_TERMS)
def test_glossary_has_each_owned_term(term: str) -> None:
    assert term in ENTRIES


@pytest.mark.parametrize("term", ENTRIES)
def test_glossary_entry_has_all_parts(term: str) -> None:
    assert tuple(re.findall(r"^- (\w+): \S", ENTRIES[term], re.MULTILINE)) == PARTS


@pytest.mark.parametrize("module", sorted(set(re.findall(r"`([\w/-]+\.py)`", TEXT))))
def test_glossary_module_exists(module: str) -> None:
    assert _source(module)


@pytest.mark.parametrize("term", ENTRIES)
def test_glossary_module_defines_named_object(term: str) -> None:
    computed = re.search(r"^- Module: (.*)$", ENTRIES[term], re.MULTILINE)
    assert computed
    modules = re.findall(r"`([\w/-]+\.py)`", computed[1])
    assert modules
    for name, module in re.findall(r"`(\w+)` in `([\w/-]+\.py)`", computed[1]):
        assert re.search(rf"^(?:class|def) {name}\b", _source(module), re.MULTILINE), f"{name} is not in {module}"
