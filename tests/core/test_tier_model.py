"""The load line: golden cases, simulation, brute force, and what must be monotone."""

from __future__ import annotations

import heapq
import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plimsoll.core.admission.cost_model import ClassPolicy, engine_cost_model
from plimsoll.core.capacity import slo_capacity, tier_model
from plimsoll.core.capacity.attainment import attainment
from plimsoll.core.capacity.goodput import goodput, goodput_knee_per_s
from plimsoll.core.capacity.kv_capacity import kv_sequences
from plimsoll.core.capacity.tier_model import Constraint, TierSpec
from plimsoll.core.engine_model.step_time import EngineLimits, KvTransfer, StepModel
from plimsoll.core.slo import Slo
from plimsoll.core.types import Role
from plimsoll.core.workload import Workload, from_samples

HOT = StepModel(
    4.742e-3, -1.3e-3, 2.265e-5, 1.035e-9, 1.816e-5, 3.048e-8
)  # an 8B, measured on an H200 at its power cap
COOL = StepModel(4.920e-3, -1.67e-3, 1.915e-5, 1.74e-9, 1.115e-5, 3.533e-8)
LARGE = StepModel(0.0132, 0.0, 5.2e-5, 1.75e-9, 2.0e-5, 4.6e-8)  # a 32B on two H100s, from a roofline
ROOMY = EngineLimits(1024, 919_824, 8192)


def lognormal(
    prompt: float, prompt_sigma: float, output: float, output_sigma: float, rows: int = 4000, mean: bool = False
) -> Workload:
    """Of these medians, or means."""
    rng = np.random.default_rng(1)
    if mean:
        prompt, output = prompt * np.exp(-(prompt_sigma**2) / 2), output * np.exp(-(output_sigma**2) / 2)
    prompts = np.ceil(prompt * np.exp(prompt_sigma * rng.standard_normal(rows)))
    outputs = np.ceil(output * np.exp(output_sigma * rng.standard_normal(rows)))
    return from_samples(prompts, np.zeros(rows), outputs)


CHAT = lognormal(1000, 0.6, 195, 0.5)
FIXED = from_samples([4000.0], [0.0], [1000.0])
SMALL = lognormal(1000, 0.6, 195, 0.5, rows=60)

SERVE = TierSpec(Role.SERVE, HOT, CHAT, ROOMY, Slo(0.95, 0.5, 0.0, 0.05))
GUIDE = TierSpec(Role.SERVE, LARGE, FIXED, EngineLimits(1024, 330_000, 8192), Slo(0.95, 3.0, 0.0, 0.1))
PREFILL = TierSpec(Role.PREFILL, HOT, CHAT, ROOMY, Slo(0.95, 0.5))
DECODE = TierSpec(Role.DECODE, COOL, CHAT, ROOMY, Slo(0.95, 0.5, 0.0, 0.025), KvTransfer(32, 128), ttft_outside_s=0.3)
KINDS = [SERVE, GUIDE, PREFILL, DECODE]
NAMES = ["serve", "guide", "prefill", "decode"]


def capacity_per_s(tier: TierSpec, replicas: int = 1, *, admission: bool = True) -> float:
    return float(slo_capacity.slo_capacity_per_s(tier_model.build_profile(tier), replicas, admission=admission)[0])


def attained_share(tier: TierSpec, rate: float, replicas: int = 1, *, admission: bool = True) -> float:
    return float(attainment(tier_model.build_profile(tier), rate, replicas, admission=admission).within_slo[0])


def binding(tier: TierSpec, replicas: int = 1) -> Constraint:
    return slo_capacity.binding_constraint(tier_model.build_profile(tier), capacity_per_s(tier, replicas), replicas)[0]


def test_slo_capacity_kv_bound_32b_matches_guide() -> None:
    """66 sequences of cache; 1.4 to 1.5 requests/s a pod in a fleet. base / (1 - rho) alone would say 2.0.

    Nor does a gate, which knows what each holds, let more of them run, whose answers are short and all alike.
    """
    reduced = tier_model.build_profile(GUIDE)
    assert (reduced.slots[0], reduced.batch[0]) == (66, 66)
    assert binding(GUIDE) is Constraint.KV
    for replicas in (3, 8):
        assert 1.4 <= capacity_per_s(GUIDE, replicas, admission=False) / replicas <= 1.5
    full = 66 / (1000 * 0.0132 + 66 * 0.4490)  # with admission: all slots busy
    assert reduced.saturation_rate_per_s(1)[0] == pytest.approx(full, rel=1e-3)
    assert reduced.step_limit_per_s[0] > full


# Share in promise behind the gate, six times 2,500 s in `admission_lab`; by hand.
@pytest.mark.parametrize(("rate", "simulated"), [(1.3, 0.9978), (1.4, 0.9886), (1.5, 0.968), (1.54, 0.9565)])
def test_attainment_kv_bound_matches_simulation(rate: float, simulated: float) -> None:
    assert attained_share(GUIDE, rate) == pytest.approx(simulated, abs=0.005)


# One pod of 66 slots, one queue, refused when out of reach, 2,500 s.
@pytest.mark.parametrize(
    ("rate", "admission", "simulated"),
    [(1.3, True, 0.9978), (1.4, True, 0.9879), (1.5, True, 0.966), (1.54, True, 0.9535), (1.3, False, 0.9921)],
)
def test_attainment_slot_bound_matches_simulation(rate: float, admission: bool, simulated: float) -> None:
    bound = replace(GUIDE, limits=EngineLimits(66, 10**9, 8192))
    assert attained_share(bound, rate, admission=admission) == pytest.approx(simulated, abs=0.005)


@pytest.mark.parametrize("gateways", [1, 3])
@pytest.mark.parametrize("sigma", [0.0, 0.3, 1.2])
def test_kv_sequences_match_sampled_residents(sigma: float, gateways: int) -> None:
    """Residents met in proportion to their stay, each anywhere in it: 99 of 100 draws fit each gateway's part."""
    w, rng = lognormal(500, 0.3, 3000, sigma), np.random.default_rng(1)
    found = kv_sequences(w, 330_000, gateways)
    stay = w.weights * w.output_tokens
    share = int(found / gateways)
    drawn = rng.choice(stay.size, (20_000, share), p=stay / stay.sum())
    held = w.prompt_tokens[drawn] + w.output_tokens[drawn] * rng.random(drawn.shape)
    fits = float(np.mean(held.sum(axis=1) <= 330_000 / gateways))
    assert fits >= 0.98 or sigma > 1.0, "few of very unequal lengths: what fits at their ends, which is more"
    assert fits <= 0.999 or sigma != 0.3


def test_slo_capacity_8b_matches_recorded_knee() -> None:
    """Simulated with the fitted step for 1,200 s: 99.3 % in promise at 20.5 requests/s, 94.8 % at 21.0."""
    assert capacity_per_s(SERVE, admission=False) == pytest.approx(21.0, rel=0.03)
    assert binding(SERVE) is Constraint.TPOT
    assert attained_share(SERVE, 20.0, admission=False) > 0.95 > attained_share(SERVE, 22.0, admission=False)


def test_slo_capacity_with_admission_exceeds_open() -> None:
    """What it lets in keeps the TPOT target, so that more load costs refusals and no promise; never beyond what the
    engine serves at that batch, and less where tails were measured to be longer than the law's."""
    reduced = tier_model.build_profile(SERVE)
    assert reduced.batch[0] < reduced.slots[0]
    assert capacity_per_s(SERVE, admission=False) < capacity_per_s(SERVE) <= reduced.saturation_rate_per_s(1)[0]
    assert 0.95 <= attained_share(SERVE, capacity_per_s(SERVE)) < attained_share(SERVE, 0.95 * capacity_per_s(SERVE))
    assert (
        capacity_per_s(replace(SERVE, tpot_tail_scale=1.2))
        < capacity_per_s(SERVE)
        < capacity_per_s(replace(SERVE, tpot_tail_scale=0.8))
    )


# Three engines of `h200-8b-hot` behind the gate, 2,048/256 tokens, TTFT 1 s, at this rate each: what was in promise.
@pytest.mark.parametrize(
    ("tpot_s", "output_sigma", "rate", "simulated"),
    [(0.040, 0.3, 12.31, 0.993), (0.020, 0.3, 10.36, 0.990), (0.012, 0.3, 7.87, 0.970), (0.008, 0.3, 4.27, 0.998),
     (0.040, 1.0, 10.23, 0.995), (0.020, 1.0, 6.96, 0.992), (0.012, 1.0, 4.33, 0.985), (0.008, 1.0, 1.92, 0.980)],
)  # fmt: skip
def test_slo_capacity_with_admission_meets_slo_in_simulation(
    tpot_s: float, output_sigma: float, rate: float, simulated: float
) -> None:
    mix = lognormal(2048, output_sigma, 256, output_sigma, mean=True)
    tier = replace(SERVE, workload=mix, slo=Slo(0.95, 1.0, 0.0, tpot_s), limits=EngineLimits(256, 720_000, 8192))
    assert (
        0.85 * rate <= capacity_per_s(tier, 3) / 3 <= 1.02 * rate
    )  # of what was drawn; less where a window is few requests
    assert 0.95 <= attained_share(tier, 0.98 * 3 * rate, 3) <= simulated + 0.01


def test_slo_capacity_infeasible_batch_falls_back_to_open() -> None:
    """Short answers among long ones: a prompt's stall is soon over for these and ruins those."""
    mix = lognormal(2048, 1.0, 256, 1.0, mean=True)
    tier = replace(SERVE, workload=mix, slo=Slo(0.95, 1.0, 0.0, 0.012))
    assert tier_model.build_profile(tier).share_within_tpot[0] < 0.9
    alone = capacity_per_s(tier, 3, admission=False)
    assert 0.99 * alone < capacity_per_s(tier, 3) <= alone


def test_admission_batch_without_binding_tpot_is_unlimited() -> None:
    for tier in (GUIDE, replace(SERVE, slo=Slo(0.95, 0.5))):
        reduced = tier_model.build_profile(tier)
        assert reduced.batch[0] == min(
            tier.limits.max_sequences, math.floor(kv_sequences(tier.workload, tier.limits.kv_tokens))
        )
        assert reduced.share_within_tpot[0] == pytest.approx(1.0)


@given(
    tpot_s=st.floats(0.006, 0.1),
    looser=st.floats(1.0, 2.0),
    slots=st.integers(2, 400),
    more=st.integers(0, 100),
    replicas=st.integers(1, 5),
    output_sigma=st.sampled_from([0.0, 0.3, 1.0]),
)
@settings(max_examples=12)
def test_slo_capacity_rises_with_tpot_target_and_slots(
    tpot_s: float, looser: float, slots: int, more: int, replicas: int, output_sigma: float
) -> None:
    tier = replace(
        SERVE,
        workload=lognormal(2048, 0.3, 256, output_sigma, rows=60),
        slo=Slo(0.95, 1.0, 0.0, tpot_s),
        limits=EngineLimits(slots, 720_000, 8192),
    )
    before, full = (
        capacity_per_s(tier, replicas),
        float(tier_model.build_profile(tier).saturation_rate_per_s(replicas)[0]),
    )
    assert before <= full * (1 + 1e-9)
    assert capacity_per_s(replace(tier, slo=replace(tier.slo, tpot_s=tpot_s * looser)), replicas) >= before * (1 - 1e-3)
    assert capacity_per_s(replace(tier, limits=EngineLimits(slots + more, 720_000, 8192)), replicas) >= before * (
        1 - 1e-3
    )


@pytest.mark.parametrize("itl_s", [None, 0.05])
@pytest.mark.parametrize("tpot_s", [0.05, 0.012])
@pytest.mark.parametrize("slots", [1024, 40])
def test_profile_batch_equals_admission_batch(slots: int, tpot_s: float, itl_s: float | None) -> None:
    slo = Slo(0.95, 0.5, 0.0, tpot_s, itl_s=itl_s)
    tier = replace(SERVE, slo=slo, limits=EngineLimits(slots, 919_824, 8192))
    reduced = tier_model.build_profile(tier)
    assert reduced.batch[0] == engine_cost_model(tier, (ClassPolicy("chat", 1, slo),)).batch
    assert reduced.batch[0] <= tier_model.build_profile(replace(tier, slo=replace(slo, itl_s=None))).batch[0]


@pytest.mark.parametrize(("rate", "recorded_s"), [(16, 0.204), (18, 0.239), (19, 0.266), (20, 0.287), (21, 0.354)])
def test_attainment_ttft_tail_matches_recording(rate: float, recorded_s: float) -> None:
    def share(ttft_s: float) -> float:
        reduced = tier_model.build_profile(replace(SERVE, slo=Slo(0.95, ttft_s)))
        return float((attainment(reduced, rate, 1).within_slo * reduced.feasible_share)[0])

    assert share(recorded_s * 0.85) < 0.95 < share(recorded_s * 1.15)


def test_constraint_depends_on_slots_kv_and_tpot() -> None:
    roomy, few_slots, little_cache = (
        replace(SERVE, limits=limits)
        for limits in (ROOMY, EngineLimits(40, 919_824, 8192), EngineLimits(1024, 60_000, 8192))
    )
    assert [binding(t) for t in (roomy, few_slots, little_cache)] == [Constraint.TPOT, Constraint.SLOTS, Constraint.KV]
    assert max(capacity_per_s(few_slots), capacity_per_s(little_cache)) < capacity_per_s(roomy)


def test_constraint_tight_ttft_binds_before_tpot() -> None:
    assert binding(replace(SERVE, slo=Slo(0.95, 0.15, 0.0, 1.0))) is Constraint.TTFT
    assert binding(PREFILL) is Constraint.TTFT
    assert binding(DECODE) is Constraint.TPOT


def prefill_simulated(tier: TierSpec, rate: float, servers: int, seed: int) -> float:
    """First come first served, let in only when in time: share of the requests that meet TTFT."""
    rng = np.random.default_rng(seed)
    w = tier.workload
    service = tier.model.prefill_s(w.uncached_tokens, w.cached_tokens, tier.limits.token_budget)
    slack = tier.slo.ttft_targets_s(w.prompt_tokens) - tier_model.unloaded_ttft_s(tier)
    count = 20_000
    rows = rng.choice(w.weights.size, count, p=w.weights)
    free = np.zeros(servers)
    now, good, feasible = 0.0, 0, 0
    for gap, row in zip(rng.exponential(1 / rate, count), rows, strict=True):
        now += gap
        first = int(np.argmin(free))
        feasible += slack[row] >= 0
        if max(free[first] - now, 0.0) <= slack[row]:
            good += 1
            free[first] = max(free[first], now) + service[row]
    return good / feasible


@pytest.mark.parametrize(("load", "servers"), [(0.8, 1), (0.95, 1), (1.0, 3)])
def test_attainment_prefill_tier_matches_simulated_queue(load: float, servers: int) -> None:
    rate = load * float(tier_model.build_profile(PREFILL).saturation_rate_per_s(servers)[0])
    assert attained_share(PREFILL, rate, servers) == pytest.approx(
        prefill_simulated(PREFILL, rate, servers, 3), abs=0.015
    )


@pytest.mark.parametrize("tier", KINDS, ids=NAMES)
def test_goodput_is_unimodal_open_and_flat_with_admission(tier: TierSpec) -> None:
    reduced = tier_model.build_profile(tier)
    peak = float(goodput_knee_per_s(reduced, 2)[0])
    rates = peak * np.array([0.3, 0.6, 0.9, 1.0, 1.1, 1.3])
    tiled = reduced.select(np.zeros(rates.size, dtype=np.intp))
    open_ = goodput(tiled, rates, 2, admission=False)
    assert np.all(np.diff(open_[:4]) > 0)
    assert np.all(np.diff(open_[3:]) <= 0)
    assert open_[-1] < open_[3]
    held = goodput(tiled, rates * 10, 2)
    assert np.all(np.diff(held) >= -1e-9)
    assert held[-1] == pytest.approx(held[-2])
    assert held[-1] >= open_.max() * (1 - 1e-9)


@pytest.mark.parametrize("admission", [True, False])
@pytest.mark.parametrize("tier", KINDS, ids=NAMES)
def test_slo_capacity_matches_grid_search(tier: TierSpec, admission: bool) -> None:
    reduced = tier_model.build_profile(tier)
    for replicas in (1, 5):
        full = float(reduced.saturation_rate_per_s(replicas, admission=admission)[0])
        rates = np.linspace(full / 400, full, 400)
        tiled = reduced.select(np.zeros(400, dtype=np.intp))
        every = attainment(tiled, rates, replicas, admission=admission)
        shares = every.within_slo
        missed = slo_capacity.weighted_miss_share(tiled, every, rates, replicas) if admission else 1 - shares
        brute = rates[np.flatnonzero(missed <= 1 - tier.slo.share)[-1]]
        found = float(slo_capacity.slo_capacity_per_s(reduced, replicas, admission=admission)[0])
        assert brute - 1e-6 * full <= found <= brute + full / 400
        assert np.all(np.diff(shares) <= 1e-9)
        assert np.all(np.diff(missed) >= -1e-9)


@pytest.mark.parametrize("replicas", [1, 5, 300])
@pytest.mark.parametrize("tier", KINDS, ids=NAMES)
def test_slo_capacity_search_needs_few_evaluations(tier: TierSpec, replicas: int) -> None:
    """A thousand services have their lines drawn anew every minute: halving would take 37 looks."""
    reduced, looks = tier_model.build_profile(tier), 0

    def excess(rate: np.ndarray) -> np.ndarray:
        nonlocal looks
        looks += 1
        missed = slo_capacity.weighted_miss_share(reduced, attainment(reduced, rate, replicas), rate, replicas)
        return np.asarray(np.log(np.maximum(missed, 1e-300) / (1 - tier.slo.share)))

    found = slo_capacity.highest_root(excess, reduced.saturation_rate_per_s(replicas))
    assert 2 <= looks <= 16
    assert found == pytest.approx(slo_capacity.slo_capacity_per_s(reduced, replicas), rel=1e-9)


@pytest.mark.parametrize("root", [1e-3, 0.3, 0.97])
def test_slo_capacity_search_finds_discontinuity(root: float) -> None:
    """Requests all alike and a promise for half of them: nobody misses, and a little later everybody does."""

    def excess(rate: np.ndarray) -> np.ndarray:
        return np.where(rate <= root, np.log(1e-300), np.log(2.0))

    assert slo_capacity.highest_root(excess, np.array([1.0])) == pytest.approx(root, rel=1e-8)


@pytest.mark.parametrize("tier", KINDS, ids=NAMES)
def test_slo_capacity_per_replica_rises_with_pooling(tier: TierSpec) -> None:
    rates = [capacity_per_s(tier, c, admission=False) / c for c in (1, 2, 4, 16, 64)]
    assert all(later >= earlier * (1 - 1e-6) for earlier, later in pairwise(rates))


def test_attainment_joint_is_below_each_target() -> None:
    both, ttft, tpot = (attained_share(replace(SERVE, slo=slo), 19.0, admission=False) for slo in (
        Slo(0.95, 0.25, 0.0, 0.03), Slo(0.95, 0.25), Slo(0.95, None, 0.0, 0.03)))  # fmt: skip
    assert both < min(ttft, tpot)
    assert both > ttft + tpot - 1  # no less than if they never failed together


def test_infeasible_prompts_are_excluded_but_add_work() -> None:
    long = from_samples([500.0, 30_000.0], [0.0, 0.0], [200.0, 200.0], [0.95, 0.05])
    mixed = tier_model.build_profile(replace(SERVE, workload=long))
    assert mixed.feasible_share[0] == pytest.approx(0.95)
    short = from_samples([500.0], [0.0], [200.0])
    assert 0 < float(slo_capacity.slo_capacity_per_s(mixed, 1)[0]) < capacity_per_s(replace(SERVE, workload=short))
    per_token = replace(SERVE, workload=long, slo=Slo(0.95, 0.5, 0.2, 0.05))
    assert tier_model.build_profile(per_token).feasible_share[0] == 1


FACTORS = st.floats(1.0, 3.0)


@given(slack=FACTORS, tpot=FACTORS, faster=FACTORS, room=FACTORS, less=FACTORS, kind=st.sampled_from(KINDS))
@settings(max_examples=8)
def test_slo_capacity_is_monotone_in_improvements(
    slack: float, tpot: float, faster: float, room: float, less: float, kind: TierSpec
) -> None:
    tier = replace(kind, workload=SMALL)
    w, m, slo = tier.workload, tier.model, tier.slo
    better = [
        replace(tier, slo=replace(slo, share=slo.share / (1 + 0.05 * (slack - 1)))),
        replace(tier, slo=replace(slo, tpot_s=None if slo.tpot_s is None else slo.tpot_s * tpot)),
        replace(tier, model=StepModel(*(getattr(m, f) / faster for f in StepModel.__dataclass_fields__))),
        replace(tier, limits=EngineLimits(int(1024 * room), int(tier.limits.kv_tokens * room), 8192)),
        replace(tier, workload=from_samples(w.uncached_tokens / less, w.cached_tokens, w.output_tokens, w.weights)),
        replace(tier, workload=from_samples(w.uncached_tokens, w.cached_tokens, w.output_tokens / less, w.weights)),
        replace(tier, arrival_cv2=1 / less),
        replace(tier, tpot_tail_scale=1 / (1 + 0.1 * (less - 1))),
    ]
    before = capacity_per_s(tier, 2)
    for change in better:
        assert capacity_per_s(change, 2) >= before * (1 - 2e-3)


def test_stacked_profiles_equal_single_profiles() -> None:
    stacked = tier_model.stack_profiles([tier_model.build_profile(tier) for tier in KINDS])
    together = slo_capacity.slo_capacity_per_s(stacked, np.array([1, 2, 3, 4]))
    assert together == pytest.approx(
        [capacity_per_s(tier, c) for tier, c in zip(KINDS, (1, 2, 3, 4), strict=True)], rel=1e-6
    )


ONE = np.ones(1)


def lost(outputs: np.ndarray, slots: int, gateways: int, rate: float, patience_s: float, step_s: float) -> float:
    """Share refused by first come, first served queues, one for each gateway's part of the slots, event by event."""
    rng = np.random.default_rng(3)
    count = 40_000
    at_s = np.cumsum(rng.exponential(1 / rate, count))
    stays_s = step_s * rng.choice(outputs, count)
    free = [[0.0] * (slots // gateways) for _ in range(gateways)]
    refused = 0
    for now_s, stay_s, gateway in zip(at_s, stays_s, rng.integers(gateways, size=count), strict=True):
        if free[gateway][0] - now_s > patience_s:
            refused += 1
        else:
            heapq.heapreplace(free[gateway], max(now_s, free[gateway][0]) + stay_s)
    return refused / count


@pytest.mark.parametrize("gateways", [1, 2])
@pytest.mark.parametrize("used", [0.9, 1.0])
def test_slot_loss_rises_with_output_cv2_and_gateways(gateways: int, used: float) -> None:
    """Outputs of CV2 2.4: more than exponential services would lose, and at most what two moments make of them."""
    outputs = np.ceil(80 * np.exp(1.07 * np.random.default_rng(1).standard_normal(4000)))
    workload = from_samples(np.ones(4000), np.zeros(4000), outputs)
    model, limits = StepModel(0.025, 0.0, 1e-9, 0.0, 1e-9, 0.0), EngineLimits(32, 10**7, 8192)
    tier = TierSpec(Role.DECODE, model, workload, limits, Slo(0.95, 2.4), KvTransfer(1, 128), gateways=gateways)
    reduced = tier_model.build_profile(tier)
    rate = used * float(reduced.saturation_rate_per_s(1)[0])
    patience_s, step_s = float(reduced.slack_s[0, 0]), float(reduced.slot_base_s[0])
    reported, exponential = (
        1 - float(attainment(one, rate, 1).within_slo[0]) for one in (reduced, replace(reduced, service_cv2=ONE))
    )
    assert exponential < lost(outputs, 32, gateways, rate, patience_s, step_s) < reported < 2.5 * exponential + 0.01


def test_slo_capacity_decreases_with_gateways() -> None:
    few = replace(DECODE, limits=EngineLimits(32, 919_824, 8192))
    lines = [capacity_per_s(replace(few, gateways=gateways)) for gateways in (1, 2, 3, 8, 100)]
    assert all(after <= before * (1 + 1e-9) for before, after in pairwise(lines))
    assert lines[-1] < 0.9 * lines[0]
    for replicas in (1, 4):  # slots are no matter there, but the gate's batch is parted as they are
        alone, parted = (
            capacity_per_s(replace(SERVE, gateways=gateways), replicas, admission=admission)
            for admission, gateways in ((False, 1), (False, 3))
        )
        assert parted == pytest.approx(alone, rel=1e-6)
    assert capacity_per_s(replace(SERVE, gateways=3)) < capacity_per_s(SERVE)
