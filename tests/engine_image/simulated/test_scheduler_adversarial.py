"""Cases that break schedulers: edges of blocks, slots and budget, and sequences that leave at the worst moment.

Whatever is done, in the end nothing is held, nobody waits, and who was not taken out has every token.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from plimsoll.sim.profiles import HardwareProfile
from simulated.sequence import ServedSequence
from tests.engine_image.simulated.core_harness import CoreHarness, make_core, make_profile

Scenario = Callable[[CoreHarness], list[ServedSequence]]


def fills_the_cache(one: CoreHarness) -> list[ServedSequence]:
    """Prompt and answer are exactly the cache."""
    return [one.add(0.0, prompt=20, tokens=20)]


def ends_on_a_block(one: CoreHarness) -> list[ServedSequence]:
    """The last token needs no block of its own: its KV is never read."""
    return [one.add(0.0, prompt=39, tokens=2)]


def one_token_each(one: CoreHarness) -> list[ServedSequence]:
    """Nobody ever decodes."""
    return [one.add(0.0, prompt=7, tokens=1) for _ in range(9)]


def equal_prompts(one: CoreHarness) -> list[ServedSequence]:
    """The same prompt many times at once: blocks are named twice, and shared while they are held."""
    return [one.add(0.0, prompt=12, tokens=6, start=0) for _ in range(5)]


def everyone_grows(one: CoreHarness) -> list[ServedSequence]:
    """All reach the end of their blocks in the same step, several times."""
    return [one.add(0.0, prompt=4, tokens=20) for _ in range(4)]


def leaves_before_it_began(one: CoreHarness) -> list[ServedSequence]:
    """A sequence of the queue is taken out."""
    stays = [one.add(0.0, prompt=30, tokens=4) for _ in range(2)]
    gone = one.add(0.0, prompt=30, tokens=4)
    one.core.drop_sequence(gone, 0.0)
    return stays


def leaves_with_its_last_token_in_flight(one: CoreHarness) -> list[ServedSequence]:
    """Its token is in a step that still runs; the step's end must not bring it back."""
    stays, gone = one.add(0.0, tokens=9), one.add(0.0, tokens=2)
    one.run(2.0)
    one.core.drop_sequence(gone, 2.5)
    return [stays]


def leaves_after_its_preemption(one: CoreHarness) -> list[ServedSequence]:
    """It waits again, without blocks, with tokens that came out already."""
    stays, gone = one.add(0.0, prompt=16, tokens=22), one.add(0.0, prompt=16, tokens=22)
    one.run(9.0)
    assert gone.preemptions == 1
    one.core.drop_sequence(gone, 9.5)
    return [stays]


def is_taken_out_twice(one: CoreHarness) -> list[ServedSequence]:
    """The client goes while the engine aborts it."""
    gone, stays = one.add(0.0, tokens=9), one.add(0.0, tokens=9)
    one.core.end_sequence(gone, "abort", 1.5)
    one.core.drop_sequence(gone, 1.5)
    return [stays]


def fetches_more_than_there_is_room_for(one: CoreHarness) -> list[ServedSequence]:
    """Prompts from elsewhere hold blocks before they run; two fit, the others wait without a dead lock."""
    return [one.add(0.0, prompt=18, tokens=3, remote=True) for _ in range(6)]


def is_preempted_with_a_fetched_prompt(one: CoreHarness) -> list[ServedSequence]:
    """What was fetched is lost with the place; it is computed the second time, and counted once."""
    made = [one.add(0.0, prompt=16, tokens=16, remote=True) for _ in range(2)]
    one.run()
    assert sum(sequence.preemptions for sequence in made) == 1
    assert one.meters.all_prompt_tokens == one.meters.transferred_prompt_tokens == 32
    return made


def waits_for_a_lease(one: CoreHarness) -> list[ServedSequence]:
    """Every block is kept for a decode engine that never comes."""
    return [one.add(0.0, prompt=39, tokens=1, keeps_kv=True), one.add(0.0, prompt=39, tokens=1)]


def comes_at_a_steps_end(one: CoreHarness) -> list[ServedSequence]:
    """Arrivals at the very moment of the end of a step, and two at once."""
    return [one.add(float(second), tokens=3) for second in (0, 1, 1, 2, 3)]


SCENARIOS = [
    fills_the_cache,
    ends_on_a_block,
    one_token_each,
    equal_prompts,
    everyone_grows,
    leaves_before_it_began,
    leaves_with_its_last_token_in_flight,
    leaves_after_its_preemption,
    is_taken_out_twice,
    fetches_more_than_there_is_room_for,
    is_preempted_with_a_fetched_prompt,
    waits_for_a_lease,
    comes_at_a_steps_end,
]
SHAPES = [
    make_profile(),
    make_profile(max_num_seqs=1, budget=1),
    make_profile(max_num_seqs=5, budget=5),
    make_profile(max_num_seqs=1),
    make_profile(max_num_seqs=2, budget=3),
    make_profile(budget=10_000, max_num_seqs=1000),
]
CONCURRENT_SCENARIOS = (leaves_after_its_preemption, is_preempted_with_a_fetched_prompt)  # two must run side by side
CASES = [
    pytest.param(story, shape, id=f"{story.__name__}-{shape.max_num_seqs}x{shape.budget}")
    for story in SCENARIOS
    for shape in SHAPES
    if story not in CONCURRENT_SCENARIOS or (shape.max_num_seqs > 2 and shape.budget > 8)
]


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize(("story", "shape"), CASES)
def test_scheduler_adversarial_case_leaks_and_loses_nothing(
    story: Scenario, shape: HardwareProfile, caching: bool
) -> None:
    one = make_core(shape, blocks=10, caching=caching)
    stayed = story(one)
    one.run()
    assert all(sequence.emitted_tokens == sequence.output_tokens for sequence in stayed)
    assert (one.core.kv_cache.used, one.core.running, one.core.waiting, one.core.loading) == (0, 0, 0, 0)
