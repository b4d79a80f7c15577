"""Prompts computed on one engine and fetched by another: what it costs, what is kept, what happens if it fails."""

from __future__ import annotations

import math

import numpy as np
import pytest

from plimsoll.core.engine_model.step_time import KvTransfer
from plimsoll.sim.engine.kv_link import KvLink
from simulated.kv_leases import LeaseTable
from simulated.sequence import ServedSequence
from tests.engine_image.simulated.core_harness import make_core, make_profile


def test_post_time_matches_kv_transfer_law() -> None:
    tokens = np.array([1, 16, 17, 1200, 8192])
    law = KvTransfer(layers=32, block_tokens=16)
    wire = KvLink(32, 16, 131_072, 1e11)
    assert [wire.post_s(int(one)) for one in tokens] == pytest.approx(law.post_s(tokens).tolist())
    assert law.post_loss_share == wire.stall_share


def test_travel_time_counts_whole_blocks_at_link_rate() -> None:
    wire = KvLink(2, 4, 1000, 1e6).scaled(2.0)
    assert (wire.transfer_bytes(5), wire.descriptors(5)) == (8000, 4)
    assert wire.transfer_s(5) == pytest.approx(2 * (1.9e-3 + 8e-3))


def test_remote_prompt_first_token_comes_one_step_after_transfer() -> None:
    one = make_core()
    sequence = one.add(0.0, prompt=10, tokens=3, remote=True)
    there = 0.7e-3 + 17.4e-6 + 13.9e-3  # posting six pieces, then three blocks of 4,000 bytes on the way
    assert (one.core.loading, one.core.running) == (1, 0)
    assert one.core.next_event_s() == pytest.approx(there)
    one.run()
    assert sequence.first_token_s == pytest.approx(there + 1.0)
    meters = one.meters
    assert (meters.transferred_prompt_tokens, meters.local_prompt_tokens, meters.all_prompt_tokens) == (10, 0, 10)
    assert one.meters.nixl["nixl_bytes_transferred"].total == 12_000
    assert one.meters.histograms["iteration_tokens_total"].total == 3


def test_posting_delays_decoding_sequences() -> None:
    alone, beside = make_core(), make_core()
    for one in (alone, beside):
        one.add(0.0, prompt=4, tokens=20)
    beside.add(2.5, prompt=2000, tokens=1, remote=True)
    late = [one.run(21.0) for one in (alone, beside)]
    wire = KvLink(2, 4, 1000, 1e6)
    assert late[1] - late[0] == pytest.approx(wire.stall_share * wire.post_s(2000))


def test_only_uncached_blocks_are_transferred() -> None:
    one = make_core()
    one.add(0.0, prompt=16, tokens=1, start=0)
    one.run()
    again = one.add(5.0, prompt=18, tokens=1, start=0, remote=True)
    one.run()
    assert (again.cached_tokens, again.transferred_tokens) == (16, 2)


def test_transferred_prompt_is_cached_afterwards() -> None:
    one = make_core()
    one.add(0.0, prompt=16, tokens=1, start=0, remote=True)
    one.run()
    again = one.add(5.0, prompt=16, tokens=1, start=0)
    one.run()
    assert again.cached_tokens == 12


def test_failed_transfer_is_computed_locally() -> None:
    one = make_core()
    sequence = one.add(0.0, prompt=10, tokens=2, remote=True)
    one.core.fetch_failed(sequence, 0.001)
    one.run()
    assert (sequence.emitted_tokens, sequence.transferred_tokens) == (2, 0)
    assert sequence.first_token_s == pytest.approx(1.001)
    assert one.meters.local_prompt_tokens == 10
    assert one.core.kv_cache.used == 0


def test_failure_after_transfer_changes_nothing() -> None:
    one = make_core()
    sequence = one.add(0.0, prompt=10, tokens=2, remote=True)
    one.core.fetch_failed(sequence, 0.5)
    one.run()
    assert (sequence.transferred_tokens, sequence.emitted_tokens) == (10, 2)


def test_waiting_sequence_with_lost_source_is_computed() -> None:
    one = make_core(blocks=4, caching=False)
    one.add(0.0, prompt=12, tokens=3)
    sequence = one.add(0.1, prompt=10, tokens=1, remote=True)
    one.core.fetch_failed(sequence, 0.2)
    one.run()
    assert (sequence.transferred_tokens, sequence.emitted_tokens) == (0, 1)


def test_disconnect_during_transfer_frees_blocks() -> None:
    one = make_core()
    sequence = one.add(0.0, prompt=10, tokens=2, remote=True)
    one.core.drop_sequence(sequence, 0.001)
    one.run()
    assert (one.core.kv_cache.used, sequence.emitted_tokens) == (0, 0)


def test_prefill_engine_keeps_blocks_until_fetched() -> None:
    one = make_core()
    sequence = one.add(0.0, prompt=10, tokens=1, keeps_kv=True)
    one.run(2.0)
    assert (one.core.running, one.core.kv_cache.used) == (0, 3)
    assert one.core.free_lease(sequence.request_id, 3.0)
    assert one.core.kv_cache.used == 0
    assert not one.core.free_lease(sequence.request_id, 4.0)


def test_expired_lease_frees_blocks_for_waiting_requests() -> None:
    one = make_core(blocks=4, caching=False, lease_s=30.0)
    one.add(0.0, prompt=14, tokens=1, keeps_kv=True)
    one.run(2.0)
    waiting = one.add(5.0, prompt=14, tokens=1)
    one.run()
    assert waiting.first_token_s == 1.0 + 30.0 + 1.0
    assert one.meters.nixl_counts["nixl_num_kv_expired_reqs"] == 1


def test_lease_does_not_expire_while_being_fetched() -> None:
    leases, sequence = LeaseTable(10.0), ServedSequence("a", bytes(28), 1, 0.0)
    leases.grant(sequence, now_s=0.0)
    assert leases.claim("a") == 7
    assert leases.next_expiry_s() == math.inf
    leases.restart_expiry("a", 50.0)
    assert leases.pop_expired(59.9) == []
    assert leases.pop_expired(60.0) == [sequence]
    assert leases.claim("a") is None


def test_aborted_prefill_keeps_no_blocks() -> None:
    one = make_core()
    sequence = one.add(0.0, prompt=10, tokens=5, keeps_kv=True)
    one.core.end_sequence(sequence, "abort", 0.5)
    assert one.core.kv_cache.used == 0


def test_remote_and_local_prefills_all_complete() -> None:
    one = make_core(make_profile(max_num_seqs=2))
    made = [one.add(0.0, prompt=8, tokens=3, remote=number % 2 == 0) for number in range(6)]
    one.run()
    assert [sequence.emitted_tokens for sequence in made] == [3] * 6
    assert one.core.kv_cache.used == 0
