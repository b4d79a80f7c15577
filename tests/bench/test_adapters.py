"""Six busy adapters on engines that run four at once: what is lost without a gateway that knows it, simulated."""

from __future__ import annotations

from bench import adapters
from plimsoll.sim.clients import RetryBehavior

SECONDS = 80.0


def test_adapters_starve_without_a_limit_at_the_gateway() -> None:
    ignores = adapters.run(adapters.BUSY, (1, 1), respects=False, seconds=SECONDS)
    assert ignores.all < 0.7
    assert ignores.worst < 0.6
    assert ignores.of("") < 0.9  # requests that wait in the engine for minutes count as its load


def test_adapters_take_turns_on_one_replica() -> None:
    retries = RetryBehavior.HONOUR
    ignores = adapters.run(adapters.BUSY, (1, 1), respects=False, retries=retries, seconds=SECONDS)
    respects = adapters.run(adapters.BUSY, (1, 1), respects=True, retries=retries, seconds=SECONDS)
    assert respects.all > 0.85 > ignores.all + 0.1
    assert respects.worst > ignores.worst + 0.2
    assert respects.of("") > 0.97


def test_adapters_spread_over_two_replicas() -> None:
    ignores = adapters.run(adapters.BUSY, (2, 2), respects=False, seconds=SECONDS)
    respects = adapters.run(adapters.BUSY, (2, 2), respects=True, seconds=SECONDS)
    assert ignores.all < 0.9
    assert respects.all > 0.98
    assert respects.worst > 0.95


def test_hot_adapters_do_not_starve_cold_ones() -> None:
    retries = RetryBehavior.HONOUR
    ignores = adapters.run(adapters.HOT_AND_COLD, (1, 1), respects=False, retries=retries, seconds=2 * SECONDS)
    respects = adapters.run(adapters.HOT_AND_COLD, (1, 1), respects=True, retries=retries, seconds=2 * SECONDS)
    assert ignores.worst < 0.2
    assert respects.worst > 0.5
    assert respects.all > 0.9  # nor the other way round
