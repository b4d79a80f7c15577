"""Generates the chart's reference page of values, and its copies of the CRDs.

The comments in values.yaml are the source of the page. A chart cannot contain files from outside, so it needs copies of
the CRDs in crds/:

    python charts/docs.py            writes what differs
    python charts/docs.py --check    writes nothing, names what differs and exits 1
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "charts" / "plimsoll"
VALUES = CHART / "values.yaml"
PAGE = ROOT / "docs" / "reference" / "values.md"
CRDS = sorted((ROOT / "crds").glob("plimsoll.dev_*.yaml"))

SHORT = 20  # characters of a comment that is written again where another value has the same one
HEADING = re.compile(r"# -- (?P<title>.+)")


@dataclass(frozen=True)
class ChartValue:
    """One key of values.yaml. comment: its documentation as one paragraph; section: the `# --` heading above it."""

    path: tuple[str, ...]
    default: Any
    comment: str
    section: str

    @property
    def name(self) -> str:
        return ".".join(self.path)


def read(text: str) -> list[ChartValue]:
    """Return every mapping key of a values file, in order, with the comment directly above it."""
    lines = text.splitlines()
    headings = {number: match["title"] for number, line in enumerate(lines) if (match := HEADING.fullmatch(line))}
    found = []
    seen: set[int] = set()
    for path, line, default in _keys(yaml.compose(text), ()):
        section = next((headings[n] for n in sorted(headings, reverse=True) if n < line), "")
        # The comment belongs to the first key of a line, not to those in its braces.
        found.append(ChartValue(path, default, "" if line in seen else _comment_above(lines, line), section))
        seen.add(line)
    return found


def rows_of(values: list[ChartValue]) -> list[ChartValue]:
    """Return the values that get a row: commented keys without commented child keys."""
    commented = [value for value in values if value.comment]
    sections = {value.path[:depth] for value in commented for depth in range(1, len(value.path))}
    return [value for value in commented if value.path not in sections]


def render_page(values: list[ChartValue]) -> str:
    """Return the reference page: a table per heading, preceded by the comments of groups."""
    rows = rows_of(values)
    repeats = _repeats(rows)
    out = ["# Chart values", "", "Generated from the comments of `charts/plimsoll/values.yaml` by `make verify`."]
    for section in dict.fromkeys(value.section for value in rows):
        out += ["", f"## {section}", ""]
        groups = [v for v in values if v.section == section and v.comment and v not in rows]
        out += [f"- `{value.name}`: {value.comment}" for value in groups]
        out += [*([""] if groups else []), "| value and default | description |", "|---|---|"]
        for value in rows:
            if value.section == section:
                comment = f"As `{repeats[value.name]}`." if value.name in repeats else _escape(value.comment)
                out.append(f"| `{value.name}: {_escape(json.dumps(value.default))}` | {comment} |")
    return "\n".join(out) + "\n"


def _repeats(rows: list[ChartValue]) -> dict[str, str]:
    """Return the names of values whose last key and long comment an earlier value has, with the name of that value."""
    first: dict[tuple[str, str], str] = {}
    long = [value for value in rows if len(value.comment) > SHORT]
    found = {value.name: first.setdefault((value.path[-1], value.comment), value.name) for value in long}
    return {name: earlier for name, earlier in found.items() if name != earlier}


def _keys(node: yaml.Node | None, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], int, Any]]:
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        key_path = (*path, key.value)
        yield key_path, key.start_mark.line, yaml.safe_load(yaml.serialize(value))
        yield from _keys(value, key_path)


def _comment_above(lines: list[str], line: int) -> str:
    comment_lines: list[str] = []
    for text in reversed(lines[:line]):
        stripped = text.strip()
        if not stripped.startswith("#") or HEADING.fullmatch(stripped):
            break
        comment_lines.insert(0, stripped.removeprefix("#").strip())
    return " ".join(comment_lines)


def _escape(text: str) -> str:
    return text.replace("|", "\\|")


def outputs() -> dict[Path, str]:
    """Return every generated file with its text."""
    return {PAGE: render_page(read(VALUES.read_text()))} | {CHART / "files" / crd.name: crd.read_text() for crd in CRDS}


def main(arguments: list[str]) -> int:
    outdated = [path for path, text in outputs().items() if not path.exists() or path.read_text() != text]
    for path in outdated:
        if "--check" in arguments:
            print(f"{path.relative_to(ROOT)} is out of date: run python charts/docs.py", file=sys.stderr)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(outputs()[path])
            print(f"wrote {path.relative_to(ROOT)}")
    return 1 if outdated and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
