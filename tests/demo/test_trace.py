"""The demo's input, and what becomes of it."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from e2e.demo import trace
from e2e.demo.prompts import CLASS_HEADER, LIGHT_CHAT_TOKENS, LIGHT_TOKEN_BYTES, TENANT_HEADER, plan_load
from e2e.demo.trace import TraceRequest


def test_slices_are_small_and_name_source_and_license() -> None:
    credits = (trace.FOLDER / "README.md").read_text()
    assert sum(path.stat().st_size for path in trace.FOLDER.glob("*.gz")) < 60_000
    for path in trace.FOLDER.glob("*.gz"):
        assert path.name in credits
    for word in ("AzurePublicDataset", "CC-BY-4.0", "VTC-artifact", "Apache-2.0"):
        assert word in credits
    assert f"{len(trace.code_requests()):,}" in credits
    assert len(trace.chat_requests()) == 1500


def test_slices_are_ordered_and_step_is_where_documented() -> None:
    for rows in (trace.code_requests(), trace.chat_requests()):
        assert [r.at_s for r in rows] == sorted(r.at_s for r in rows)
        assert all(r.prompt_tokens > 0 and r.output_tokens > 0 for r in rows)
    step = trace.code_requests([1])
    assert step
    assert all(trace.STEP[0] <= r.at_s < trace.STEP[1] for r in step)


def test_fleet_load_has_step_per_tier_and_constant_end() -> None:
    rows = trace.fleet_load()
    assert [r.at_s for r in rows] == sorted(r.at_s for r in rows)
    assert rows[-1].at_s < trace.LENGTH_S

    def rate(request_class: str, begin_s: float, end_s: float) -> float:
        return sum(r.request_class == request_class for r in trace.clip(rows, begin_s, end_s)) / (end_s - begin_s)

    assert rate("code", *trace.STEP) > 1.5 * rate("code", 0, trace.STEP[0])
    assert rate("chat", *trace.WAVE) == pytest.approx(2 * rate("chat", 0, trace.WAVE[0]), rel=0.15)
    for request_class in ("code", "chat"):
        last = [
            r.at_s for r in trace.clip(rows, trace.REAL_ARRIVALS_S, trace.LENGTH_S) if r.request_class == request_class
        ]
        gaps = [b - a for a, b in pairwise(last)]
        assert max(gaps) == pytest.approx(min(gaps))


def test_engines_load_fits_real_engines() -> None:
    rows = trace.engines_load()
    assert 40 <= len(rows) <= 80
    assert rows[-1].at_s <= trace.REAL_ARRIVALS_S / trace.ENGINES_TIME_SCALE
    for row in rows:
        assert row.prompt_tokens >= trace.MIN_PROMPT_TOKENS
        assert row.prompt_tokens + row.output_tokens <= trace.CONTEXT_TOKENS
        assert row.output_tokens <= trace.MAX_OUTPUT_TOKENS


def test_thin_scales_times_and_drops_unsuitable_rows() -> None:
    rows = [
        TraceRequest(10, 400, 10),
        TraceRequest(11, 5000, 10),
        TraceRequest(12, 400, 10),
        TraceRequest(13, 255, 9),
        TraceRequest(15, 500, 90),
    ]
    assert trace.sample_rows(rows, scale=5, every=2, limit_tokens=4000) == [
        TraceRequest(2, 400, 10),
        TraceRequest(3, 500, 64),
    ]
    assert trace.sample_rows([], 1, 1, 4000) == []


def test_shifted_wraps_around_and_evenly_keeps_order() -> None:
    rows = [TraceRequest(1, 10, 1), TraceRequest(5, 20, 1), TraceRequest(9, 30, 1)]
    assert [(r.at_s, r.prompt_tokens) for r in trace.shift_cyclic(rows, 4, 10)] == [(3, 30), (5, 10), (9, 20)]
    assert [(r.at_s, r.prompt_tokens) for r in trace.spread_evenly(rows, 10, 16)] == [(11, 10), (13, 20), (15, 30)]


def test_plan_prompts_are_unique_with_row_length_and_headers() -> None:
    rows = [
        TraceRequest(0, 300, 500, "code", "a"),
        TraceRequest(1, 300, 8, "chat", "b"),
        TraceRequest(2, 7, 1, "chat", "b"),
    ]
    first, second, third = plan_load(rows, LIGHT_TOKEN_BYTES, "run", LIGHT_CHAT_TOKENS).arrivals
    assert [len(a.prompt.text) for a in (first, second, third)] == [1192, 1192, 20]
    assert [a.prompt.max_tokens for a in (first, second, third)] == [500, 8, 1]
    assert [a.at_s for a in (first, second, third)] == [0, 1, 2]
    assert first.prompt.text[:8] != second.prompt.text[:8]
    assert dict(second.prompt.headers) == {CLASS_HEADER: "chat", TENANT_HEADER: "b"}
    assert dict(second.prompt.labels)["prompt_tokens"] == "300"


def test_fleet_load_prompts_differ_in_first_bytes() -> None:
    rows = trace.fleet_load()
    begins = Counter(
        a.prompt.text[:40] for a in plan_load(rows[:2000], LIGHT_TOKEN_BYTES, "r", LIGHT_CHAT_TOKENS).arrivals
    )
    long = [text for text in begins if len(text) == 40]
    assert all(begins[text] == 1 for text in long)
