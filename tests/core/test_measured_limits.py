"""Engine limits that readings contradict."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from plimsoll.core.autoscaling.ingest import ingest
from plimsoll.core.autoscaling.inputs import ScalingSpec, ServiceSnapshot, TierSnapshot
from plimsoll.core.autoscaling.scaling_policy import ScalingPolicy, TierPolicy
from plimsoll.core.autoscaling.service_state import ServiceState
from plimsoll.core.autoscaling.state_checkpoint import dump_service_state, restore_service_state
from plimsoll.core.demand.engine_aggregator import EngineAggregator
from plimsoll.core.demand.service_metrics import NO_DATA, ServiceMetrics, TierMetrics
from plimsoll.core.engine_model.measured_limits import (
    NO_MEASURED_LIMITS,
    EngineBatch,
    KvDeviation,
    MeasuredLimits,
    is_one_configuration,
    update_limits,
)
from plimsoll.core.engine_model.step_time import EngineLimits
from plimsoll.core.ports import BucketCounts, EngineInfo, EngineReading
from plimsoll.core.types import Role
from plimsoll.core.workload import from_samples
from plimsoll.sim import profile, startup
from plimsoll.sim.engine.sequence import EngineSequence
from plimsoll.sim.engine_reading import scrape
from plimsoll.sim.plant import Plant

ANNOUNCED = EngineLimits(max_sequences=256, kv_tokens=100_000, token_budget=8192)
NOW_S = 1.8e9
CHAT = from_samples([1000, 1000], [0, 0], [200, 400])


def learn(batches: list[EngineBatch], start: MeasuredLimits = NO_MEASURED_LIMITS) -> EngineLimits:
    return update_limits(start, batches, ANNOUNCED, NOW_S).apply(ANNOUNCED)


def filled(share: float, errors: float = 0.0, readings: int = 40, used: float = 0.02) -> list[EngineBatch]:
    """Readings of engines whose KV cache is this share of the announced one. used: standard deviation of its use;
    errors: of the counted tokens, over that of the tokens in use.
    """
    draw = Random(1)
    tokens = used * share * ANNOUNCED.kv_tokens
    moves = [(draw.gauss(), draw.gauss()) for _ in range(readings)]
    return [EngineBatch(30, 0.0, 0.3, KvDeviation(tokens * (x + errors * e), used * x)) for x, e in moves]


def played(lengths: tuple[float, float, float], rate: float, hardware: str, share: float) -> float:
    """KV tokens over those of the profile, by the readings of four engines that hold this share, after five minutes.

    lengths: mean prompt and output tokens, sigma of their logarithms.
    """
    real = profile.load(hardware)
    announced = EngineLimits(real.max_num_seqs, real.kv_tokens, real.budget)
    held = replace(real, kv_tokens=int(real.kv_tokens * share))
    draw, aggregator, limits = Random(2), EngineAggregator(Role.SERVE), NO_MEASURED_LIMITS
    prompt, output, sigma = lengths
    engines = [Plant(held, startup.parse("60")).engine(Role.SERVE, draw) for _ in range(4)]
    arrival_s, number = 0.0, 0
    for step in range(1, 61):
        while (arrival_s := arrival_s + draw.expovariate(rate)) < 5.0 * step:
            tokens, answer = (
                max(1, round(mean * draw.lognormvariate(-(sigma**2) / 2, sigma))) for mean in (prompt, output)
            )
            engines[number % 4].add(EngineSequence(number, tokens, answer), arrival_s)
            number += 1
        for name, engine in enumerate(engines):
            aggregator.observe(scrape(engine, str(name), 5.0 * step, NOW_S + 5.0 * step))
        metrics = aggregator.collect(NOW_S + 5.0 * step, ["0", "1", "2", "3"], 0.95, NO_DATA, NO_DATA)
        limits = update_limits(limits, metrics.batches, announced, NOW_S + 5.0 * step)
        assert share < 1.0 or limits.apply(announced) == announced
    return limits.apply(announced).kv_tokens / announced.kv_tokens


def test_slots_are_what_runs_while_many_wait() -> None:
    before = [EngineBatch(n, 0.0, 0.2) for n in range(1, 33)]
    full = [EngineBatch(32, 40.0, 0.3)] * 8
    assert learn([*before, *full[1:]]) == ANNOUNCED
    assert learn([*before, *full]).max_sequences == 32
    assert update_limits(NO_MEASURED_LIMITS, before, ANNOUNCED, NOW_S).max_sequences == math.inf


def test_slots_do_not_fade_but_end_with_more_sequences() -> None:
    limits = update_limits(NO_MEASURED_LIMITS, [EngineBatch(32, 40.0, 0.3)] * 8, ANNOUNCED, NOW_S)
    assert learn([EngineBatch(20, 0.0, 0.2)] * 5000, limits).max_sequences == 32
    assert learn([EngineBatch(33, 0.0, 0.3)], limits) == ANNOUNCED


def test_slots_end_without_evidence_for_two_hours() -> None:
    """Gateways send no more than the limit allows, so no reading could ever contradict a wrong one."""
    full = [EngineBatch(32, 40.0, 0.3)]
    limits = update_limits(NO_MEASURED_LIMITS, full * 8, ANNOUNCED, NOW_S)
    quiet = [EngineBatch(30, 0.0, 0.3)]
    kept = update_limits(limits, quiet, ANNOUNCED, NOW_S + 7200)
    assert kept.apply(ANNOUNCED).max_sequences == 32
    assert update_limits(kept, quiet, ANNOUNCED, NOW_S + 7201).apply(ANNOUNCED) == ANNOUNCED
    confirmed = update_limits(limits, full, ANNOUNCED, NOW_S + 7000)
    later = update_limits(confirmed, quiet, ANNOUNCED, NOW_S + 14000)
    assert later.apply(ANNOUNCED).max_sequences == 32


def test_slots_are_at_least_an_eighth_of_those_announced() -> None:
    assert learn([EngineBatch(8, 10.0, 0.1)] * 100).max_sequences == 32


@pytest.mark.parametrize(
    ("waiting", "kv_used"), [(40.0, 0.95), (40.0, None), (4.0, 0.3)], ids=["KV is full", "KV unknown", "few wait"]
)
def test_slots_need_queue_and_room(waiting: float, kv_used: float | None) -> None:
    assert learn([EngineBatch(32, waiting, kv_used)] * 20).max_sequences == 256


def test_slots_few_sequences_are_no_limit() -> None:
    """A long prompt takes the token budget of each step, and others wait although places are free."""
    assert learn([EngineBatch(1, 1.0, 0.1)] * 100) == ANNOUNCED
    assert learn([EngineBatch(7, 9.0, 0.1)] * 100) == ANNOUNCED


@pytest.mark.parametrize(
    "batch",
    [EngineBatch(1e12, 0.0, 0.2), EngineBatch(-5.0, 9.0, 0.6), EngineBatch(30, 0.0, 60.0), EngineBatch(30, 0.0, -1.0)],
    ids=["too many", "negative", "KV in percent", "negative KV"],
)
def test_impossible_reading_changes_nothing(batch: EngineBatch) -> None:
    assert update_limits(NO_MEASURED_LIMITS, [batch] * 20, ANNOUNCED, NOW_S) == NO_MEASURED_LIMITS


def test_one_reading_in_error_does_not_hide_a_limit_for_ever() -> None:
    """A page that once reports more than was announced shows no lower limit, until it is forgotten."""
    start = update_limits(NO_MEASURED_LIMITS, [EngineBatch(5e8, 0.0, 0.2)], ANNOUNCED, NOW_S)
    full = [EngineBatch(32, 40.0, 0.3)] * 20
    assert learn(full, start) == ANNOUNCED
    later = update_limits(start, full, ANNOUNCED, NOW_S + 7201)
    assert later.apply(ANNOUNCED).max_sequences == 32


def test_kv_of_impossible_engine_is_not_counted() -> None:
    wrong = [EngineBatch(1e6, 0.0, 0.9, KvDeviation(1.0, 0.5)), EngineBatch(30, 0.0, 0.3, KvDeviation(1e12, 0.5))]
    assert learn(wrong * 20) == ANNOUNCED
    assert learn(wrong * 20 + filled(0.5)).kv_tokens == pytest.approx(50_000, rel=0.01)


def test_waiting_that_is_no_number_changes_nothing() -> None:
    assert learn([EngineBatch(32, math.nan, 0.3)] * 20) == ANNOUNCED


def test_slots_varying_batch_is_no_limit() -> None:
    draw = Random(1)
    batches = [EngineBatch(draw.randint(20, 60), 30.0, 0.3) for _ in range(500)]
    assert learn(batches) == ANNOUNCED


@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize(
    ("lengths", "rate", "hardware"),
    [((4000.0, 1000.0, 0.6), 4.0, "h100x2-32b"), ((2000.0, 2500.0, 1.2), 3.0, "h200-70b")],
    ids=["chat", "long answers"],
)
def test_kv_by_readings_of_engines(
    lengths: tuple[float, float, float], rate: float, hardware: str, share: float
) -> None:
    """The mean tokens of a running sequence, by the request lengths, err by a fifth and more where answers are long."""
    assert played(lengths, rate, hardware, share) == pytest.approx(share, rel=0.12)


@pytest.mark.parametrize(
    "batches",
    [filled(0.9), filled(0.5)[:7], filled(0.5, errors=1.0), filled(1.4)],
    ids=["little less", "few readings", "errors prevail", "shared prefixes"],
)
def test_kv_stays_as_announced(batches: list[EngineBatch]) -> None:
    assert learn(batches) == ANNOUNCED


def test_kv_half_is_seen_in_a_nearly_empty_cache() -> None:
    assert learn(filled(0.5)).kv_tokens == pytest.approx(50_000, rel=0.01)
    assert 50_000 < learn(filled(0.5, errors=0.5)).kv_tokens < 70_000


def test_kv_limit_ends_once_a_full_one_is_seen() -> None:
    limits = update_limits(NO_MEASURED_LIMITS, filled(0.5), ANNOUNCED, NOW_S)
    assert learn(filled(0.5, readings=300, used=0.0), limits).kv_tokens < 60_000
    assert learn(filled(1.0, used=0.05), limits) == ANNOUNCED


def test_minute_is_settled_with_the_same_replicas_ready() -> None:
    tier = ServiceState.for_roles(["serve"]).tiers["serve"]
    settled = [second for second in range(200) if tier.ends_settled_minute(4, second != 50, NOW_S + second)]
    assert settled == [111, 171]
    assert not any(tier.ends_settled_minute(4 + second % 2, True, NOW_S + 200 + second) for second in range(100))


def test_limits_survive_a_restart_unless_engines_announce_others() -> None:
    service = ServiceState.for_roles(["serve"])
    service.tiers["serve"].engines.announced = ANNOUNCED
    service.tiers["serve"].engines.measured_limits = update_limits(
        NO_MEASURED_LIMITS, [EngineBatch(32, 40.0, 0.3)] * 8, ANNOUNCED, NOW_S
    )
    stored = json.loads(json.dumps(dump_service_state(service)))
    for announced, slots in ((256, 32), (128, 128)):
        restored = ServiceState.for_roles(["serve"])
        restore_service_state(restored, stored)
        info = EngineInfo("vllm", "vllm 0.32", "H200", 1, announced, ANNOUNCED.kv_tokens, ANNOUNCED.token_budget)
        restored.tiers["serve"].on_engine_info(info)
        assert restored.tiers["serve"].engines.limits == replace(ANNOUNCED, max_sequences=slots)


def test_stored_limits_in_error_cannot_stop_a_decision() -> None:
    """Sums that no reading makes, as of a checkpoint edited by hand."""
    stored = MeasuredLimits(32.0, 9.0, 9.0, confirmed_s=1e11, readings=9.0, tokens=1e9, used=-1e9)
    limits = update_limits(stored, [EngineBatch(1, 0.0, 0.1)], ANNOUNCED, NOW_S)
    assert limits.apply(ANNOUNCED) == ANNOUNCED


def engine_info(max_sequences: int = 256, kv_tokens: int = ANNOUNCED.kv_tokens) -> EngineInfo:
    return EngineInfo("vllm", "vllm 0.32", "H200", 1, max_sequences, kv_tokens, ANNOUNCED.token_budget)


def test_limits_after_a_restart_are_unknown_before_a_report() -> None:
    service = ServiceState.for_roles(["serve"])
    tier = service.tiers["serve"].engines
    tier.announced = ANNOUNCED
    tier.update_limits([EngineBatch(32, 40.0, 0.3)] * 8, NOW_S)
    assert tier.limits is None


@pytest.mark.parametrize(("kv_tokens", "slots"), [(101_000, 32), (60_000, 256)], ids=["another pod", "another engine"])
def test_limits_end_with_another_configuration_only(kv_tokens: int, slots: int) -> None:
    """The KV caches of one tier's pods differ by some blocks, and any of them may be the one that is read."""
    tier = ServiceState.for_roles(["serve"]).tiers["serve"].engines
    tier.on_engine_info(engine_info())
    tier.update_limits([EngineBatch(32, 40.0, 0.3)] * 8, NOW_S)
    tier.on_engine_info(engine_info(kv_tokens=kv_tokens))
    assert tier.limits == EngineLimits(slots, kv_tokens, ANNOUNCED.token_budget)


@pytest.mark.parametrize(
    ("second", "is_one"),
    [
        (replace(ANNOUNCED, kv_tokens=104_000), True),
        (replace(ANNOUNCED, kv_tokens=96_000), True),
        (replace(ANNOUNCED, kv_tokens=60_000), False),
        (replace(ANNOUNCED, max_sequences=255), False),
        (replace(ANNOUNCED, token_budget=2048), False),
    ],
    ids=["some blocks more", "some blocks less", "KV cache", "sequences", "token budget"],
)
def test_engines_of_one_configuration_differ_by_kv_blocks(second: EngineLimits, is_one: bool) -> None:
    assert is_one_configuration((ANNOUNCED, second)) == is_one_configuration((second, ANNOUNCED)) == is_one
    assert is_one_configuration(())


def aggregated(batch: EngineBatch, pod: str, ready: list[str]) -> tuple[EngineBatch, ...]:
    """The tier's metrics after two reports of one engine."""
    aggregator = EngineAggregator(Role.SERVE)
    for after_s in (0.0, 5.0):
        reading = EngineReading(pod, NOW_S + after_s, "1", running=batch.running, waiting=batch.waiting, kv_used=0.3)
        aggregator.observe(reading)
    aggregator.observe(EngineReading("ready", NOW_S + 5.0, "1", running=1.0, waiting=0.0, kv_used=0.1))
    return aggregator.collect(NOW_S + 5.0, ready, 0.95, NO_DATA, NO_DATA).batches


@pytest.mark.parametrize(("role", "is_known"), [(Role.SERVE, True), (Role.DECODE, False)])
def test_kv_of_waiting_transfers_is_not_counted(role: Role, is_known: bool) -> None:
    """A decode engine received the KV of requests that wait, but counts their prompts with their first tokens."""
    aggregator, lengths = EngineAggregator(role), BucketCounts((math.inf,), (1.0,), 100.0)
    for step, waiting in enumerate((0.0, 0.0, 4.0, 0.0, 0.0)):
        reading = EngineReading("a", NOW_S + 5.0 * step, "1", 9.0, waiting, 0.3, prompt_tokens=lengths)
        counted = replace(reading, output_tokens=lengths, generated_tokens=0.0, local_prompt_tokens=9.0 * step)
        aggregator.observe(replace(counted, cached_prompt_tokens=0.0))
    batches = aggregator.collect(NOW_S + 20.0, ["a"], 0.95, NO_DATA, NO_DATA).batches
    assert [batch.kv_deviation is not None for batch in batches] == [True, is_known, is_known, True]


@pytest.mark.parametrize("error", [{"kv_used": math.inf}, {"kv_used": 1e6}, {"local_prompt_tokens": math.nan}])
def test_kv_after_page_in_error_starts_again(error: dict[str, Any]) -> None:
    aggregator, lengths = EngineAggregator(Role.SERVE), BucketCounts((math.inf,), (1.0,), 100.0)
    for step in range(6):
        reading = EngineReading("a", NOW_S + 5.0 * step, "1", 9.0, 0.0, 0.3, prompt_tokens=lengths)
        counted = replace(reading, output_tokens=lengths, generated_tokens=0.0, local_prompt_tokens=9.0)
        valid = replace(counted, cached_prompt_tokens=0.0)
        aggregator.observe(replace(valid, **error) if step == 2 else valid)
    batches = aggregator.collect(NOW_S + 25.0, ["a"], 0.95, NO_DATA, NO_DATA).batches
    found = [batch.kv_deviation for batch in batches]
    assert found == [KvDeviation(), None, None, KvDeviation(), KvDeviation()]


def test_engine_that_is_not_ready_shows_no_limit() -> None:
    """It drains, perhaps of a former revision with fewer places."""
    batch = EngineBatch(32.0, 40.0, 0.3)
    assert aggregated(batch, "old", ["old", "ready"]) == (batch,)
    assert aggregated(batch, "old", ["ready"]) == ()


@pytest.mark.parametrize(("is_uniform", "slots"), [(True, 32), (False, 256)])
def test_engines_of_two_kinds_show_no_limit(is_uniform: bool, slots: int) -> None:
    service = ServiceState.for_roles(["serve"])
    metrics = TierMetrics(batches=(EngineBatch(32, 40.0, 0.3),) * 8)
    tiers = {"serve": TierSnapshot(2, 2, engine_info=engine_info(), is_uniform=is_uniform)}
    snapshot = ServiceSnapshot(ServiceMetrics(workload=CHAT, tiers={Role.SERVE: metrics}), tiers)
    ingest(service, snapshot, ScalingSpec(ScalingPolicy({"serve": TierPolicy(0, 8)}), None), NOW_S)
    limits = service.tiers["serve"].engines.limits
    assert limits is not None
    assert limits.max_sequences == slots
