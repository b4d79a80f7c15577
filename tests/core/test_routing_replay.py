"""A replay of Mooncake's requests: what caches save, and what it costs in time to first token."""

from __future__ import annotations

import pytest

from bench.picking.prefix_replay import ideal_cached_tokens, load_trace, replay

ENGINES, KV_TOKENS = 6, 2_870_000
REQUESTS = load_trace("synthetic", 900)


@pytest.mark.parametrize("gateways", [1, 2, 3])
def test_routing_replay_saves_90_percent_of_ideal_hits(gateways: int) -> None:
    least = replay(REQUESTS, ENGINES, KV_TOKENS, gateways, prefix_aware=False)
    ours = replay(REQUESTS, ENGINES, KV_TOKENS, gateways)
    print(f"\n{gateways} gateways: {least=} {ours=}")
    assert ours.hits >= 0.9
    assert least.hits <= ours.hits / 2
    assert ours.p95_s <= 1.05 * least.p95_s
    assert ours.unfinished == least.unfinished == 0


def test_routing_replay_trace_shares_prefixes() -> None:
    assert sum(ideal_cached_tokens(REQUESTS)) > 0.15 * sum(asked.prompt for asked in REQUESTS)
    assert len(REQUESTS[0].blocks) == REQUESTS[0].prompt // 128
