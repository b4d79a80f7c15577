"""Figures in messages: plain decimals that a person reads, and one place in the product that makes them."""

from __future__ import annotations

import ast
import math
import re
import string
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import plimsoll
from plimsoll.core import units

PACKAGE = Path(plimsoll.__file__).parent
HELPERS = ("round_significant", "format_figure")  # of core/units.py
EXPONENT_SPEC = re.compile(r"[gGeEn]$")
PERCENT_SPEC = re.compile(r"%[-+ #0]*\d*(\.\d+)?[gGeE]")
READABLE = st.floats(1e-12, 1e15) | st.floats(-1e15, -1e-12)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (-0.0, "0"),
        (120.0, "120"),
        (123_456.0, "123000"),
        (1_234_567, "1230000"),
        (9.1, "9.1"),
        (0.00312, "0.00312"),
        (-41.27, "-41.3"),
        (0.9999, "1"),
        (999.9, "1000"),
        (1e-13, "0"),
        (1e18, "over 10^15"),
        (-1e18, "below -10^15"),
        (math.inf, "infinite"),
        (-math.inf, "-infinite"),
        (math.nan, "not a number"),
    ],
)
def test_format_figure_reads_as_people_write(value: float, text: str) -> None:
    assert units.format_figure(value) == text


@given(READABLE)
def test_format_figure_has_three_digits_and_the_sign(value: float) -> None:
    text = units.format_figure(value)
    assert re.fullmatch(r"-?[0-9]+(\.[0-9]+)?", text)
    assert text.startswith("-") == (value < 0)
    assert Decimal(text) == Decimal(f"{value:.3g}")
    assert len(text.lstrip("-0.").replace(".", "").rstrip("0")) <= 3


@given(st.floats())
def test_format_figure_never_has_an_exponent(value: float) -> None:
    assert not re.search(r"[0-9][eE]", units.format_figure(value))
    assert len(units.format_figure(value)) <= 20
    assert not re.search(r"[0-9][eE]", units.format_seconds(value))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (2.7, "2.7 s"),
        (0.35, "350 ms"),
        (0.9999, "1 s"),
        (0.0157, "15.7 ms"),
        (1.2e-5, "12 us"),
        (3.1e-11, "31 ps"),
        (1e-20, "0 s"),
        (-0.0012, "-1.2 ms"),
        (86_399.0, "86399 s"),
        (53.7, "54 s"),
        (math.inf, "infinite s"),
    ],
)
def test_format_seconds_picks_the_unit(seconds: float, text: str) -> None:
    assert units.format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (632e-6, "0 s"),
        (0.335, "340 ms"),
        (1.46, "1.5 s"),
        (3.74, "4 s"),
        (24.2, "24 s"),
        (86_399.0, "86399 s"),
        (math.inf, "infinite s"),
    ],
)
def test_format_wait_has_the_digits_that_a_reader_needs(seconds: float, text: str) -> None:
    assert units.format_wait(seconds) == text


@given(st.floats(1e-12, 1e12))
def test_format_seconds_keeps_the_value(seconds: float) -> None:
    number, unit = units.format_seconds(seconds).split(" ")
    scale = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9, "ps": 1e-12}[unit]
    assert float(number) * scale == pytest.approx(seconds, rel=5.1e-3, abs=0.0 if seconds < 10.0 else 0.5)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0s"), (1e-7, "0s"), (0.0051, "5.1ms"), (0.34, "340ms"), (1.24, "1.2s"), (95.2, "95s"), (2.7e6, "2700000s")],
)
def test_rounded_duration_can_be_read_back(seconds: float, text: str) -> None:
    assert units.format_rounded_duration(seconds) == text
    assert units.parse_duration(text) == pytest.approx(seconds, rel=0.05, abs=1e-6)


def test_message_formats_named_figures_and_quotes_text() -> None:
    template = "{} needs {:rate} in {:seconds}, {:figure} each, {:.0%} used"
    values = ("a {:figure} b", 123.4, 0.35, 1e6, 0.5)
    assert units.format_message(template, values) == "a {:figure} b needs 123 req/s in 350 ms, 1000000 each, 50% used"


def _specs(text: str) -> Iterator[str]:
    """The format specs of a string if it is a template of `str.format`."""
    try:
        yield from (spec for _, _, spec, _ in string.Formatter().parse(text) if spec)
    except ValueError:
        return


def _exponent_formats(path: Path) -> Iterator[str]:
    """Each place in a module that can write a number with an exponent."""
    tree = ast.parse(path.read_text())
    exempt: set[ast.AST] = set()
    if path.name == "units.py":
        helpers = [one for one in tree.body if isinstance(one, ast.FunctionDef) and one.name in HELPERS]
        assert [one.name for one in helpers] == list(HELPERS)
        exempt = {node for helper in helpers for node in ast.walk(helper)}
    for node in ast.walk(tree):
        if node in exempt:
            continue
        found: list[str] = []
        if isinstance(node, ast.FormattedValue) and node.format_spec is not None:
            found = [part.value for part in ast.walk(node.format_spec) if isinstance(part, ast.Constant)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found = [*_specs(node.value), *(match[0] for match in PERCENT_SPEC.finditer(node.value))]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "format":
            found = [str(part.value) for part in node.args[1:] if isinstance(part, ast.Constant)]
        yield from (
            f"{path.relative_to(PACKAGE)}:{getattr(node, 'lineno', 0)} {spec}"
            for spec in found
            if EXPONENT_SPEC.search(str(spec)) and str(spec) not in units.MESSAGE_FORMATS
        )


def test_only_the_helpers_can_write_exponents() -> None:
    assert [place for path in sorted(PACKAGE.rglob("*.py")) for place in _exponent_formats(path)] == []


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.95, "0.95"), (99.99, "99.99"), (1000.0, "1000"), (1e6, "1000000"), (1e-300, "1e-300"), (math.nan, "nan")],
)
def test_format_number_keeps_what_was_given(value: float, text: str) -> None:
    assert units.format_number(value) == text
