"""A replay of Mooncake's requests: what caches save, and what it costs in time to first token."""

from __future__ import annotations

import pytest

from bench.picking.replay import ideal, replay, trace

ENGINES, KV_TOKENS = 6, 2_870_000
ASKED = trace("synthetic", 900)


@pytest.mark.parametrize("gateways", [1, 2, 3])
def test_nine_tenths_of_what_an_endless_cache_would_save_are_saved_and_nobody_waits_longer(gateways: int) -> None:
    least = replay(ASKED, ENGINES, KV_TOKENS, gateways, told=False)
    ours = replay(ASKED, ENGINES, KV_TOKENS, gateways)
    print(f"\n{gateways} gateways: {least=} {ours=}")
    assert ours.hits >= 0.9
    assert least.hits <= ours.hits / 2
    assert ours.p95_s <= 1.05 * least.p95_s
    assert ours.lost == least.lost == 0


def test_the_trace_shares_beginnings() -> None:
    assert sum(ideal(ASKED)) > 0.15 * sum(asked.prompt for asked in ASKED)
    assert len(ASKED[0].blocks) == ASKED[0].prompt // 128
