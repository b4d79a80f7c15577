"""What policies that follow the load would have made of the same arrivals: the frontier that the fleet is held to.

Problem: attainment alone says nothing, for enough replicas keep any promise. Idea: Follower(margin, spare, hold, cap,
window) orders ceil(work rate over the trailing window / margin) + spare and gives back what it has not needed for
`hold` seconds. It knows the plant's coefficients, which ours has to learn, and nothing of the future: not how long an
answer will be (its work counts from when an idle engine would have written it). It drives the
light engines' own core (`plant.py`) over the arrivals of requests.jsonl, with the kill and fresh draws of start-up,
spread and noise.

Each tier is replayed alone, for its own followers: a decode tier gets each prompt when an idle prefill engine would
have handed it over, and a request's time to first token is what it took in prefill plus what it took in decode. So a
pair of followers costs no replay of its own, and a full prefill tier does not even out what decode sees. HTTP and
gateway cost `LEG_S` a leg; KV kept for transfer does not fill a prefill engine. With a cap a follower holds and refuses
as the gateway does. A refused request is a miss.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from typing import Final

import numpy as np
from numpy.typing import NDArray

from e2e.demo.figures import Targets
from e2e.demo.plant import ReplicaKind, SimulatedRequest, TierSimulation, replay
from e2e.demo.records import RequestLine

REMOTE_PREFILL_OVERHEAD_S: Final = 0.008  # HTTP, parsing, a connection: seconds a leg
BLOCK_TOKENS: Final = 128
SEED: Final = 20260101
PREFILL_QUEUE_CAP_S: Final = 2.0  # seconds of prompts at one engine, of the three in which the first token is due
PROCESSES: Final = 2
DECODE_CAP: Final = 32.0  # sequences at one engine: its slots


@dataclass(frozen=True, slots=True)
class Setting:
    """One follower of one tier. Times in seconds, `cap` in the tier's unit of cost, None: no admission."""

    margin: float
    spare: int
    hold_s: float
    window_s: float
    cap: float | None


@dataclass(frozen=True)
class ReplicaBounds:
    """A tier's replicas: at least, at most."""

    least: int
    most: int


@dataclass(frozen=True)
class BaselineContext:
    """What the followers meet: kinds and bounds of both tiers, the run's length, and which tier is hit when."""

    kinds: dict[str, ReplicaKind]
    bounds: dict[str, ReplicaBounds]
    end_s: float
    kill_tier: str | None
    kill_s: float


@dataclass(frozen=True)
class TierResult:
    """One follower's tier over all requests: seconds to the first token (inf: never) and a token, replica-seconds."""

    setting: Setting
    first_s: NDArray[np.float64]
    tpot_s: NDArray[np.float64]
    paid_s: float


@dataclass(frozen=True)
class Pair:
    """A prefill and a decode follower together: share of all requests that met both targets, and at what cost."""

    prefill: Setting
    decode: Setting
    attainment: float
    paid_s: float


def setting_grid(with_caps: bool) -> dict[str, list[Setting]]:
    """The followers that are tried, by tier; with caps where the service's gateway admits by them."""
    prefill = product(
        (0.6, 0.7, 0.8, 0.9, 0.95), (0, 1), (20.0, 75.0), (15.0,), (PREFILL_QUEUE_CAP_S if with_caps else None,)
    )
    decode = product((0.6, 0.75, 0.9), (0, 1), (45.0,), (20.0,), (DECODE_CAP if with_caps else None,))
    return {"prefill": [Setting(*setting) for setting in prefill], "decode": [Setting(*setting) for setting in decode]}


def tier_jobs(requests: Sequence[RequestLine], scene: BaselineContext) -> dict[str, list[SimulatedRequest | None]]:
    """Each request as the two tiers see it; None in prefill for a prompt that is read where it is decoded."""
    return {
        "prefill": [_prefill_job(request, scene.kinds["prefill"]) for request in requests],
        "decode": [_decode_job(request, scene) for request in requests],
    }


def _transfers_kv(request: RequestLine) -> bool:
    return request.prompt_tokens >= BLOCK_TOKENS


def _prefill_work(tokens: int, kind: ReplicaKind) -> float:
    c, budget = kind.profile.coefficients, kind.profile.budget
    return kind.factor * (tokens * (c.pretok + (c.base + c.anypre) / budget) + c.preattn * tokens**2 / 2)


def _unloaded_prefill_s(tokens: int, kind: ReplicaKind) -> float:
    c = kind.profile.coefficients
    return kind.factor * (c.base + c.anypre + c.pretok * tokens + c.preattn * tokens**2 / 2)


def _prefill_job(request: RequestLine, kind: ReplicaKind) -> SimulatedRequest | None:
    if not _transfers_kv(request):
        return None
    work = _prefill_work(request.prompt_tokens, kind)
    return SimulatedRequest(request.sent_s, request.prompt_tokens, 1, work, work)


def _decode_job(request: RequestLine, scene: BaselineContext) -> SimulatedRequest:
    kind, tokens, output = scene.kinds["decode"], request.prompt_tokens, request.output_tokens_asked
    c = kind.profile.coefficients
    work = kind.factor * output * (c.base / kind.max_sequences + c.dec + c.ctx * (tokens + output / 2))
    at_s = request.sent_s
    if _transfers_kv(request):
        at_s += _unloaded_prefill_s(tokens, scene.kinds["prefill"]) + REMOTE_PREFILL_OVERHEAD_S
    else:
        work += kind.factor * (c.anypre + c.pretok * tokens)
    unloaded_s = kind.factor * (output - 1) * (c.base + c.dec + c.ctx * tokens)
    return SimulatedRequest(at_s, tokens, output, work, 1.0, known_s=unloaded_s, remote=_transfers_kv(request))


class ReactiveScaler:
    """Replicas wanted at each tick, from work that became known in the trailing window."""

    def __init__(self, setting: Setting, bounds: ReplicaBounds, work: Sequence[SimulatedRequest]) -> None:
        self._setting, self._bounds = setting, bounds
        by_time = sorted((job.at_s + job.known_s, job.work_s) for job in work)
        self._at = np.array([at_s for at_s, _ in by_time])
        self._sum = np.concatenate([[0.0], np.cumsum([work_s for _, work_s in by_time])])
        self._needs: list[tuple[float, int]] = []

    def desired(self, now_s: float) -> int:
        """Replicas, for the largest need of the last `hold` seconds."""
        s = self._setting
        first, last = np.searchsorted(self._at, [now_s - s.window_s, now_s], side="right")
        known_until_s = min(s.window_s, max(now_s, 1.0))
        rate = float(self._sum[last] - self._sum[first]) / known_until_s
        required = math.ceil(rate / s.margin) + s.spare
        self._needs = [(at, n) for at, n in self._needs if at >= now_s - s.hold_s] + [(now_s, required)]
        return min(self._bounds.most, max(self._bounds.least, max(n for _, n in self._needs)))


def run_setting(
    tier: str, setting: Setting, requests: Sequence[SimulatedRequest | None], scene: BaselineContext, targets: Targets
) -> TierResult:
    """One follower of one tier over the whole run."""
    pending_jobs = [replace(job) if job else None for job in requests]
    tier_simulation = sorted((job for job in pending_jobs if job), key=lambda job: job.at_s)
    kind, bounds = scene.kinds[tier], scene.bounds[tier]
    fleet = TierSimulation(kind, bounds.least, setting.cap, targets.ttft_s, SEED)
    follower = ReactiveScaler(setting, bounds, tier_simulation)
    replay(fleet, tier_simulation, scene.end_s, follower.desired, scene.kill_s if scene.kill_tier == tier else None)
    first_token_s = np.array(
        [
            0.0 if job is None else _elapsed(job.first_token_s, job.at_s) + REMOTE_PREFILL_OVERHEAD_S
            for job in pending_jobs
        ]
    )
    tpot = np.array([0.0 if job is None else _per_token(job) for job in pending_jobs])
    return TierResult(setting, first_token_s, tpot, fleet.paid_s(scene.end_s))


def _elapsed(moment: float | None, start_s: float) -> float:
    return math.inf if moment is None else moment - start_s


def _per_token(job: SimulatedRequest) -> float:
    if job.first_token_s is None or job.last_token_s is None:
        return math.inf
    return (job.last_token_s - job.first_token_s) / (job.output_tokens - 1) if job.output_tokens > 1 else 0.0


def combine_settings(
    prefill: Sequence[TierResult], decode: Sequence[TierResult], prompts: Sequence[int], targets: Targets
) -> list[Pair]:
    """Every prefill follower with every decode follower."""
    limits = np.array([targets.ttft_of(tokens) for tokens in prompts])
    return [
        Pair(p.setting, d.setting, float(np.mean((p.first_s + d.first_s <= limits) & (d.tpot_s <= targets.tpot_s))),
             p.paid_s + d.paid_s)
        for p in prefill
        for d in decode
    ]  # fmt: skip


def pareto_front(pairs_found: Sequence[Pair]) -> list[Pair]:
    """Those that none beats at a lower cost, cheapest first."""
    best_attainment: list[Pair] = []
    for pair in sorted(pairs_found, key=lambda one: (one.paid_s, -one.attainment)):
        if not best_attainment or pair.attainment > best_attainment[-1].attainment:
            best_attainment.append(pair)
    return best_attainment


def best_within_cost(pairs_found: Sequence[Pair], paid_s: float) -> Pair | None:
    """The one with the highest attainment at no more than so many replica-seconds."""
    affordable = [candidate for candidate in pairs_found if candidate.paid_s <= paid_s]
    return max(affordable, key=lambda candidate: (candidate.attainment, -candidate.paid_s), default=None)


def all_pairs(requests: Sequence[RequestLine], scene: BaselineContext, targets: Targets, with_caps: bool) -> list[Pair]:
    """Every pair of the grid over these requests."""
    requests_used, settings = tier_jobs(requests, scene), setting_grid(with_caps)
    with ProcessPoolExecutor(PROCESSES) as pool:
        tasks = {
            tier: [
                pool.submit(run_setting, tier, setting, requests_used[tier], scene, targets)
                for setting in settings[tier]
            ]
            for tier in ("decode", "prefill")  # the slow ones first
        }
        results = {tier: [setting.result() for setting in futures] for tier, futures in tasks.items()}
    return combine_settings(
        results["prefill"], results["decode"], [setting.prompt_tokens for setting in requests], targets
    )
