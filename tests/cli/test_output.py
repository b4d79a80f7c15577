"""Layout: what a terminal and what a pipe get, and what never passes."""

from __future__ import annotations

import io

import pytest

from plimsoll.cli.output import (
    Screen,
    format_age,
    format_duration,
    format_table,
    hanging_indent,
    printable_line,
    truncate,
)

PIPE = Screen()
ROWS = [["A", "LONGER", "WORDS"], ["some", "x", "one two three four five six seven eight"]]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_table_to_pipe_is_aligned_and_uncut() -> None:
    assert format_table(ROWS, PIPE, "  ") == [
        "  A     LONGER  WORDS",
        "  some  x       one two three four five six seven eight",
    ]


def test_table_to_terminal_wraps_last_column() -> None:
    assert format_table(ROWS, Screen(39)) == [
        "A     LONGER  WORDS",
        "some  x       one two three four five",
        "              six seven eight",
    ]


def test_table_too_narrow_is_left_unwrapped() -> None:
    assert format_table(ROWS, Screen(20))[1].endswith("eight")


def test_hanging_long_word_is_broken_without_loss() -> None:
    lines = hanging_indent("why: ", "y" * 70, Screen(35))
    assert max(map(len, lines)) <= 35
    assert "".join(line[5:] for line in lines) == "y" * 70


def test_table_emphasis_keeps_alignment() -> None:
    bright = format_table(ROWS, Screen(None, supports_colour=True), alarm_rows={1})
    assert bright[0].startswith("\x1b[1m")
    assert bright[1].startswith("\x1b[31m")
    assert [
        line.replace("\x1b[1m", "").replace("\x1b[31m", "").replace("\x1b[0m", "") for line in bright
    ] == format_table(ROWS, PIPE)


def test_screen_reflects_stream_and_environment() -> None:
    assert Screen.for_stream(io.StringIO(), {"TERM": "xterm"}) == PIPE
    assert Screen.for_stream(Terminal(), {"TERM": "xterm"}).supports_colour
    assert not Screen.for_stream(Terminal(), {"TERM": "dumb"}).supports_colour
    assert not Screen.for_stream(Terminal(), {"TERM": "xterm", "NO_COLOR": ""}).supports_colour
    assert Screen.for_stream(Terminal(), {}).width is not None


@pytest.mark.parametrize("hostile", ["a\x1b[2Jb", "a\x07b", "a\u202eb", "a\x9bb", "a\u2028\x00b"])
def test_output_has_no_control_characters(hostile: str) -> None:
    for shown in (
        printable_line(hostile),
        *format_table([[hostile, hostile]], PIPE),
        *hanging_indent("", hostile, PIPE),
    ):
        assert shown.isprintable()
        assert "a" in shown


def test_plain_and_cut_yield_one_line() -> None:
    assert printable_line(" one\n two\tthree ") == "one two three"
    assert truncate("> ", "one two three", Screen(10)) == "> one t..."
    assert truncate("> ", "one", Screen(5)) == "> one"


def test_table_without_rows_is_empty() -> None:
    assert format_table([], PIPE) == []


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(None, "-"), (0.0, "0 s"), (0.34, "340 ms"), (1.24, "1.24 s"), (95.2, "95 s"), (213.0, "213 s")],
)  # fmt: skip
def test_duration_format(seconds: float | None, words: str) -> None:
    assert format_duration(seconds) == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(-5, "0s"), (0, "0s"), (119, "119s"), (120, "2m"), (7199, "119m"), (7200, "2h"), (172800, "2d"), (1e7, "115d")],
)
def test_age_format_matches_kubectl(seconds: float, words: str) -> None:
    assert format_age(seconds) == words
