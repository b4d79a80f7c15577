"""Each design record has a status, a date and its four parts. Records and the page of the law are short."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

from tests.chart.rendering import ROOT

MAX_WORDS: Final = 600
MAX_LAW_WORDS: Final = 1500
PARTS: Final = ("Question", "Decision", "Alternatives", "Consequences")
RECORDS: Final = sorted((ROOT / "docs/design").glob("*.md"))


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: str(record.stem))
def test_record_has_status_date_and_parts(record: Path) -> None:
    text = record.read_text()
    assert re.search(r"^Status: \w+\b.* Date: \d{4}-\d\d-\d\d", text, re.MULTILINE)
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert [heading for heading in headings if heading in PARTS] == list(PARTS)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: str(record.stem))
def test_record_has_at_most_600_words(record: Path) -> None:
    assert _words(record) <= MAX_WORDS


def test_page_of_the_law_has_at_most_1500_words() -> None:
    assert _words(ROOT / "docs/concepts/autoscaling.md") <= MAX_LAW_WORDS


def _words(page: Path) -> int:
    return sum(any(map(str.isalnum, word)) for word in page.read_text().split())
