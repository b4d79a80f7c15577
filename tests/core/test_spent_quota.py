"""A quota that moves between controllers admits what one controller admits."""

from __future__ import annotations

from random import Random

import pytest

from plimsoll.core.admission.quota import TenantPolicy, TenantQuotas

LIMITED = TenantPolicy(requests_per_s=2.0, tokens_per_min=960.0)  # 16 tokens per second; exact in binary


@pytest.mark.parametrize("seed", range(5))
def test_moved_quota_admits_what_one_controller_admits(seed: int) -> None:
    rng = Random(seed)
    alone, counting, moves, admitted = TenantQuotas(), TenantQuotas(), 0, 0
    for step in range(2000):
        now = step / 8
        if rng.random() < 0.05:
            heir = TenantQuotas()
            for tenant, spent in counting.take_spent(now).items():
                heir.spend(tenant, LIMITED, spent, now)
            assert len(counting) == 0
            counting, moves = heir, moves + 1
        tokens = rng.choice((1.0, 8.0, 64.0))
        wait_s = alone.take("jobs", LIMITED, tokens, now)
        assert counting.take("jobs", LIMITED, tokens, now) == pytest.approx(wait_s)
        admitted += wait_s == 0.0
    assert moves > 50
    assert 0 < admitted < 2000


def test_quota_admitted_twice_is_owed_by_the_next_controller() -> None:
    """Two controllers admit at the same time, such as while one does not reach the other."""
    first, second = TenantQuotas(), TenantQuotas()
    for quotas in (first, second):
        assert [quotas.take("jobs", LIMITED, 0.0, 0.0) for _ in range(20)] == [0.0] * 20  # a burst of ten seconds
    for tenant, spent in first.take_spent(0.0).items():
        second.spend(tenant, LIMITED, spent, 0.0)
    assert second.take("jobs", LIMITED, 0.0, 0.0) == pytest.approx(10.5)


def test_tenant_without_limit_owes_nothing() -> None:
    quotas = TenantQuotas()
    assert quotas.take("jobs", TenantPolicy(requests_per_s=2.0), 1e9, 0.0) == 0.0
    assert quotas.take_spent(0.0) == {"jobs": (1.0, 0.0)}
    assert quotas.take_spent(0.0) == {}
