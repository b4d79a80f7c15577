"""The demo's trace and what becomes of it."""

from __future__ import annotations

from e2e.demo.trace import TRACE, Row, plan, read, thin


def test_the_trace_names_its_source_and_licence() -> None:
    head = TRACE.read_text()[:600]
    assert "AzurePublicDataset" in head
    assert "CC-BY-4.0" in head
    rows = read()
    assert rows == sorted(rows, key=lambda row: row.arrival_s)
    assert len(rows) > 50


def test_thinning_keeps_moments_and_leaves_out_what_does_not_fit() -> None:
    rows = [Row(10, 400, 10), Row(11, 5000, 10), Row(12, 400, 10), Row(13, 255, 9), Row(15.5, 500, 20), Row(16, 600, 9)]
    assert thin(rows, every=2, limit_tokens=4000) == [Row(0, 400, 10), Row(5.5, 500, 20)]
    assert thin([]) == []


def test_prompts_are_unique_and_of_the_rows_lengths() -> None:
    loop = plan([Row(0, 300, 500), Row(1, 300, 8)], tokens_per_word=1.5, run="x")
    first, second = loop.arrivals
    assert [len(a.prompt.text.split()) for a in (first, second)] == [201, 201]
    assert [a.prompt.max_tokens for a in (first, second)] == [64, 8]
    assert first.prompt.text[:8] != second.prompt.text[:8]
