"""Durations and quantities: read as Go and Kubernetes read them, written so that they can be read again."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.core import units


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("500ms", 0.5),
        ("1.5s", 1.5),
        ("1m30s", 90),
        ("2h", 7200),
        ("1h0m0s", 3600),
        ("10us", 1e-5),
        ("10µs", 1e-5),
        ("1ns", 1e-9),
        ("0s", 0),
        ("1s1s", 2),
        ("0.1s", 0.1),
    ],
)
def test_parse_duration_returns_seconds(text: str, seconds: float) -> None:
    assert units.parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "5", "s", "-1s", "+1s", "1 s", "1.s", ".5s", "1d", "1S", "1s\n", "1e3s", "٣s", "∞s"]
)
def test_parse_duration_invalid_text_raises_with_example(text: str) -> None:
    with pytest.raises(ValueError, match="such as 500ms"):
        units.parse_duration(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (1e-9, "1ns"),
        (1.5e-6, "1.5us"),
        (0.05, "50ms"),
        (0.1234, "123.4ms"),
        (1, "1s"),
        (1.5, "1.5s"),
        (60, "1m"),
        (90, "1m30s"),
        (3600, "1h"),
        (3661.25, "1h1m1.25s"),
        (0.9999999999, "1s"),
        (59.9999999999, "1m"),
    ],
)
def test_format_duration_is_short(seconds: float, text: str) -> None:
    assert units.format_duration(seconds) == text


@pytest.mark.parametrize("seconds", [-1, float("inf"), float("nan")])
def test_format_duration_negative_or_non_finite_raises(seconds: float) -> None:
    with pytest.raises(ValueError, match="zero or more"):
        units.format_duration(seconds)


@given(st.integers(0, 10**16))
def test_duration_round_trip_is_exact(nanoseconds: int) -> None:
    seconds = nanoseconds / 1e9
    assert units.parse_duration(units.format_duration(seconds)) == pytest.approx(seconds, abs=1e-9, rel=1e-15)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1", "1"),
        (4, "4"),
        ("500m", "0.5"),
        ("64Gi", str(64 * 2**30)),
        ("0.5Ti", str(2**39)),
        ("1k", "1000"),
        ("1E", "1e18"),
        ("1E3", "1000"),
        ("1e-3", "0.001"),
        ("-2Ki", "-2048"),
        ("+1M", "1e6"),
        (".5", "0.5"),
        ("2.", "2"),
        ("3u", "3e-6"),
        ("3n", "3e-9"),
    ],
)
def test_parse_quantity_is_exact(text: str | int, number: str) -> None:
    assert units.parse_quantity(text) == Decimal(number)


@pytest.mark.parametrize(
    "text", ["", "Gi", "1GB", "1gi", "1Ki1", "1 Gi", "0x10", "1_000", "1K", "--1", ".", "1e", "1\n", True]
)
def test_parse_quantity_invalid_text_raises_with_example(text: str | int) -> None:
    with pytest.raises(ValueError, match="such as 500m"):
        units.parse_quantity(text)


@pytest.mark.parametrize(("text", "number"), [("0%", 0), ("25%", 25), ("00%", 0), ("100%", 100)])
def test_parse_percent_returns_number(text: str, number: int) -> None:
    assert units.parse_percent(text) == number


@pytest.mark.parametrize("text", ["", "%", "5", "101%", "-1%", "1.5%", "25% ", "25%\n"])
def test_parse_percent_invalid_text_raises(text: str) -> None:
    with pytest.raises(ValueError, match="write 0% to 100%"):
        units.parse_percent(text)
