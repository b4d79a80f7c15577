"""What the page says beyond its runs: mechanisms that were deleted, and cases that no row has.

Problem: a mechanism that was deleted has no switch, and a row of half an hour shows no day. Idea: both are written
down here, with the figures that decided.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Deletion(NamedTuple):
    """A mechanism that is gone. lines: of `core`, with all that only it used. shown: without it, less with it."""

    name: str
    did: str
    lines: int
    shown: str


class NamedCase(NamedTuple):
    """A case that shows what a mechanism earns where the rows do not. shown: without it, less with it."""

    name: str
    case: str
    shown: str


DELETIONS: Final = (
    Deletion(
        "risk-control",
        "Moved the quantile to size for by the share of missed requests, once per start-up time.",
        140,
        "15 runs on 6 rows, 8 of them equal: attainment 0.00 to -0.05 (one run, two requests), GPU-hours -1.66 to "
        "+0.43 %. On autoregressive demand it spent the error budget on a smaller margin: 5.0 % of the work was above "
        "the forecast, 1.4 % without. Not by the switch, but by two versions, `azure-code`, seed 1: attainment +0.11, "
        "GPU-hours +2.4 %",
    ),
    Deletion(
        "uncertainty-price",
        "Sized for the error of the level as far as a replica for it paid off, also while no retries were due.",
        70,
        "After a level shift it added 10 % of a level that was one second old, and the replica that this ordered "
        "stayed for two start-up times. `azure-code` (1 seed): attainment -0.04, GPU-hours -2.0 %; `unseen-flood` (1 "
        "seed) -0.11 and +1.2 %; `short` (3 seeds) 0.00, -0.51 and 0.00, GPU-hours -4.2 %. On seven of eight series of "
        "demand the forecast is the same within 0.2 %, because small errors never paid for a replica",
    ),
    Deletion(
        "order-delay",
        "Ordered at once only what a rise of arrivals or misses asked for, while few requests missed.",
        138,
        "In none of 12 places (seed 1, program `9777c565`: `none`, `half-kv`, `two-prompts`, `sigma`, `retry-mixed`, "
        "`unseen-flood`, `unseen-naps-pd`, `step-60`, `shift-60-pd`, `ramp-120`, `guide`, and two seeds of `short`) "
        "did it change a single order, nor in ten minutes of `slow` at 30 requests/s and of `slow-fabric`: the limit "
        "of standby replicas by the growth of other services, and a level that is certain, had taken its cases",
    ),
    Deletion(
        "carried-need",
        "While few requests missed, a need of up to a quarter more than what was ordered did not count.",
        4,
        "A part of `order-delay`, with the same runs",
    ),
)
NAMED_CASES: Final = (
    NamedCase(
        "kept-by-late-load",
        "10 requests/s for 20 minutes, TTFT 200 ms, a host that adds 107 ms, engines that report a benchmark (2 seeds)",
        "one seed the same; the other in time 96.9 instead of 97.9 %, 19 instead of 22 of 24 windows of 500 requests, "
        "two reversals instead of one, for 4.8 % fewer GPU-hours",
    ),
    NamedCase(
        "season",
        "days that rise tenfold from seven to nine, engines start in 15 minutes (`demand_series`, 3 seeds)",
        "work above the forecast 1.90 % instead of 0.50 %; with starts of 60 s 0.36 instead of 0.33 %; on days "
        "without a pattern nothing changes",
    ),
    NamedCase(
        "own-growth-burst",
        "bursts of three minutes every twenty, engines start in 4 minutes (`demand_series`, 3 seeds)",
        "work above the forecast 22.7 % instead of 6.0 %, for half of what is held",
    ),
    NamedCase(
        "standby-own-growth",
        "`slow-fabric` (4 seeds) and `unseen-flood` (5 seeds)",
        "GPU-hours +26 to +53 % and +15 to +27 %, at the same attainment. It costs attainment where load leaps (up to "
        "1.5 points on `unseen-square`), and 15 to 46 points on `few-slots-pd`, where each replica more helps",
    ),
    NamedCase(
        "standby-retention",
        "`step-120` (5 seeds); `half-kv` (5 seeds)",
        "attainment -4.03 and -4.35 points on two seeds of `step-120`, whose standby engine goes before the jump; "
        "-0.58, -3.18, 0.00, -2.68 and -0.37 on `half-kv`. It costs up to 6 % of GPU-hours on loads that do not leap "
        "(`none`, `fast`, `host-load`), at the same attainment",
    ),
    NamedCase(
        "kv-transfer",
        "`slow-fabric` (4 seeds)",
        "GPU-hours +6, +20, +16 and 0 %, at the same attainment",
    ),
    NamedCase(
        "idle-learning",
        "a request every five minutes, engines start in 4 minutes (`demand_series`, 3 seeds)",
        "600 of 600 requests are late instead of one, at 64 % more replica time; of six such series none costs less",
    ),
    NamedCase(
        "lagging-signals",
        "demand unknown, one signal above its limit (`tests/core/test_lagging_signals.py`)",
        "the tier is not scaled",
    ),
    NamedCase("partial-lengths", "`unseen-flood` (5 seeds)", "attainment -4.06 to -6.04 points"),
    NamedCase(
        "recent-outputs", "`outputs-grow` (3 seeds)", "attainment -1.38, 0.00 and -1.04 points; no run of it gains"
    ),
    NamedCase(
        "level-uncertainty",
        "`retry-honour` (1 seed)",
        "49 % of the rejections have a retry reservation instead of 100 %; attainment -0.19, GPU-hours -1.6 %",
    ),
    NamedCase(
        "downscale-regret",
        "`unseen-square` (4 seeds)",
        "31 to 52 changes more and attainment -2.62 to -6.45 points, at -22 to +6 % GPU-hours",
    ),
    NamedCase(
        "media-ratios",
        "prompts with pictures (`tests/core/test_token_ratios.py`)",
        "the tokens of a picture stay those of the estimate; no row has pictures",
    ),
    NamedCase(
        "rejection-feedback",
        "ten minutes of `few-slots-pd` (1 seed)",
        "attainment 2.1 % instead of 48.8: nothing else saw that a pair is short of slots "
        "(measured before `measured-limits`, and before it chose the tier where requests wait; half an hour, 4 seeds: "
        "-24 to -65 points). It changes no order of "
        "`none`, `half-kv`, `two-prompts`, `sigma`, `retry-mixed`, `unseen-flood`, `unseen-naps-pd`, `step-60`, "
        "`shift-60-pd`, `ramp-120` and `guide` (1 seed)",
    ),
    NamedCase(
        "trend",
        "`ramp-120` (5 seeds); half an hour of rise and half an hour of fall (`demand_series`, 3 seeds)",
        "attainment -0.50 to -1.30 points, at 2 to 9 % fewer GPU-hours; on the series 7 to 9 % more is held, "
        "and 0.1 to 1.1 points "
        "less work is above the forecast",
    ),
    NamedCase(
        "mix-shift",
        "8 requests/s whose outputs shrink from 300 to 60 tokens (`replay` in `tests/core/test_request_lengths.py`); "
        "`outputs-shrink` (1 seed)",
        "after 75 s outputs count 231 tokens instead of 60, after five minutes 131; the same attainment, GPU-hours "
        "+3.2 %",
    ),
    NamedCase(
        "prompt-correction",
        "engines count 300 tokens where gateways estimate 250 (`tests/core/test_signals.py`)",
        "prompts count 250 tokens; the gateways of the simulator estimate exactly, so no row can show it",
    ),
    NamedCase(
        "overdue",
        "pods that never start, and pods on nodes that do not report (`tests/core/test_scaling_pending.py`)",
        "no replacement is ordered, so the tier stays short for as long as they exist. On two short loads with one "
        "start in four of ten minutes (1 seed) attainment is -0.04 and 0.00, GPU-hours -3 and -21 %: the load did not "
        "need those pods",
    ),
    NamedCase(
        "one-replacement",
        "1, then 6 requests/s; starts take 150 s after three of 30 s (`tests/sim/test_startup_change.py`)",
        "12 replicas are ordered instead of 6, with 7 reversals instead of 1",
    ),
    NamedCase(
        "startup-change",
        "starts of 240 and 30 s, twenty of one kind before (`tests/core/test_startup_time.py`)",
        "after one start of 30 s the 90th percentile stays 288 s instead of 65 s; after two of 240 s pods are overdue "
        "after 68 s instead of 287 s",
    ),
    NamedCase(
        "measured-limits",
        "`few-slots-pd` and `half-kv` (1 seed)",
        "attainment -41.3 and -5.7 points; GPU-hours +24 % on `half-kv`; `few-slots` (1 seed) does not differ",
    ),
    NamedCase(
        "itl-limit",
        "chunks of 8,192 tokens instead of the announced 1,024, `itl` 50 ms ([design studies](design-studies.md))",
        "p99 ITL stays at 71 ms, with four replicas instead of eight",
    ),
    NamedCase(
        "standby-base",
        "`two-prompts` (1 seed)",
        "10 changes instead of 4, with four reversals instead of none, GPU-hours +3.0 %, the same attainment; on "
        "`sigma` and `half-kv` (1 seed) 7 changes instead of 5 and GPU-hours +0.5 %",
    ),
    NamedCase(
        "idle-cost",
        "`unseen-naps-pd` (1 seed)",
        "the last replicas never go: GPU-hours +12.5 %, 12 changes instead of 24. What it saves costs attainment: "
        "78.0 instead of 84.3 %",
    ),
    NamedCase(
        "prefix-share",
        "engines that read a quarter of each prompt from their cache (`tests/core/test_signals.py`)",
        "the cached share is 0 instead of 25 %, so prefill counts a third more tokens than engines compute",
    ),
    NamedCase(
        "prefix-affinity",
        "`mooncake` (1 seed); a conversation of 25,600 tokens that comes back (`tests/core/test_prefix_affinity.py`)",
        "attainment -0.53 points, GPU-hours +0.4 %; its first token is predicted after 0.96 s instead of 0.03 s, at "
        "the engine that has it cached",
    ),
    NamedCase(
        "retry-detection",
        "a client whose `Retry-After` is 30 s (`tests/core/test_retry_detection.py`)",
        "its retry after 31 s counts as a new request",
    ),
    NamedCase(
        "prefill-lateness",
        "a prompt that is done half a second early, and an engine that is late (`tests/core/test_prefill_queue.py`)",
        "the engine's queue counts as busy until 1.02 s instead of 0.52 s; the next prompt goes to the late engine",
    ),
    NamedCase(
        "kv-projection",
        "one engine, 2 requests/s of 500/3,000 tokens, an overload (`a third` in "
        "`tests/core/test_admission_kv.py`, 5 seeds)",
        "goodput 1.12 to 1.18 instead of 1.42 to 1.50 requests/s; of what is admitted 99.8 % or more is within the SLO "
        "in both",
    ),
    NamedCase(
        "gateway-shares",
        "two gateways that cannot reach the owner, with shares of 90 and 10 of 100 slots "
        "(`tests/bench/test_ablation_probes.py`)",
        "at the next division the first may use 50 slots instead of 89, and the second 11, the same",
    ),
)
UNDECIDED: Final[tuple[NamedCase, ...]] = ()
