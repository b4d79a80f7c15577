"""Self-contained HTML reports without scripts and fonts."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Final

_STYLE: Final = """
body { font: 15px/1.45 sans-serif; max-width: 980px; margin: 2em auto; padding: 0 1em; color: #222 }
table { border-collapse: collapse; margin: .6em 0 }
td, th { text-align: left; padding: .2em .8em .2em 0; vertical-align: top }
th { border-bottom: 1px solid #bbb }
.no { color: #b00020; font-weight: bold }
.yes { color: #2e7d4f; font-weight: bold }
h2 { margin-top: 1.6em } small { color: #666 } svg { max-width: 100%; height: auto }
"""


def render_page(title: str, sections: Sequence[tuple[str, str]]) -> str:
    """Return one HTML file with titled sections; titles are escaped, bodies must be HTML."""
    body = "\n".join(f"<h2>{html.escape(head)}</h2>\n{section_html}" for head, section_html in sections)
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{_STYLE}</style>'
    opening = f'<!doctype html>\n<html lang="en"><head>{head}</head><body>'
    return f"{opening}<h1>{html.escape(title)}</h1>\n{body}</body></html>\n"


def render_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return an HTML table; every cell is escaped."""
    heads = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    lines = ("".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) for row in rows)
    return f"<table><tr>{heads}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"
