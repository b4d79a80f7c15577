"""The scaling decision explains itself."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from plimsoll.core.scaling import TierPolicy, decide

bounds = st.integers(0, 1000).flatmap(lambda low: st.tuples(st.just(low), st.integers(low, 1000)))


@given(st.dictionaries(st.sampled_from(["prefill", "decode", "serve"]), bounds))
def test_every_tier_is_decided_within_its_bounds_and_by_its_last_step(tiers: dict[str, tuple[int, int]]) -> None:
    decided = decide({name: TierPolicy(*b) for name, b in tiers.items()})
    assert decided.keys() == tiers.keys()
    for name, (low, high) in tiers.items():
        assert low <= decided[name].replicas <= high
        assert decided[name].steps[-1].replicas == decided[name].replicas
        assert str(low) in decided[name].why
