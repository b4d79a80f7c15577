"""Comparisons over many runs: the followers' frontier, the best of them in hindsight, a schedule found for the trace.

Problem: one setting of a yardstick proves nothing, and a yardstick that was tried less than what it is held against
proves less.

Idea: a comparison names policies, each a word that anybody can run again. Followers: thousands of settings are screened
by the work alone (`sim.screen`), those worth a run are run with a plain cap on what is in flight, and the ones near the
front of these with the other caps and with the operator's model as well, whose runs cost most. The clairvoyant: the
cheapest schedule of those that know the future, then one replica less here, an order later or a release sooner there,
for as long as it still attains what it has to. How runs are made is the caller's: here are only words, seeds and means.
"""

from __future__ import annotations

import math
import multiprocessing
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

from plimsoll.core.picking.endpoint import Role
from plimsoll.sim import screen
from plimsoll.sim.errors import BadInput
from plimsoll.sim.policies import clairvoyant, registry
from plimsoll.sim.policies.base import Scene
from plimsoll.sim.policies.options import Options
from plimsoll.sim.screen import Ground
from plimsoll.sim.work import Work

Summary = Mapping[str, Any]
One = Callable[[str, int], Summary]  # a policy's word and a seed -> the figures of the run
Play = Callable[[Sequence[tuple[str, int]]], Sequence[Summary]]  # many of them, in their order

COMPARISONS: Final = registry.COMPARISONS
CAPS: Final = (0.65, 0.4, 0.5, 0.8)  # of the sequences with which a replica would keep the promise
_RUNS: Final = 40
_NEAR: Final = 12  # of those that were run with the first cap: how many are run with the other admissions
_KEEPS: Final = 0.99  # of windows, or of requests where there is no window
_SOONER_S: Final = (120.0, 30.0)  # by which a step is moved


@dataclass(frozen=True)
class Point:
    """A policy's means over the seeds. windows: share of all windows that passed, None where there were none."""

    word: str
    attainment: float
    gpu_hours: float
    windows: float | None = None


class Field:
    """Policies that were run, each once with every seed."""

    def __init__(self, play: Play, seeds: Sequence[int]) -> None:
        self._play, self._seeds = play, seeds
        self._points: dict[str, Point] = {}

    def points(self, words: Iterable[str]) -> list[Point]:
        wanted = list(dict.fromkeys(words))
        new = [word for word in wanted if word not in self._points]
        found = iter(self._play([(word, seed) for word in new for seed in self._seeds]) if new else ())
        for word in new:
            self._points[word] = point(word, [next(found) for _ in self._seeds])
        return [self._points[word] for word in wanted]


def playing(one: One, processes: int = 1) -> Play:
    """Runs of one function; with more than one process, in forked ones."""

    def play(runs: Sequence[tuple[str, int]]) -> Sequence[Summary]:
        if processes == 1:
            return [one(*run) for run in runs]
        forked = multiprocessing.get_context("fork")
        with ProcessPoolExecutor(processes, forked, _take, (one,)) as pool:
            return list(pool.map(_made, runs))

    return play


_one: One | None = None  # of a forked process


def _take(one: One) -> None:
    global _one
    _one = one


def _made(run: tuple[str, int]) -> Summary:
    assert _one is not None
    return _one(*run)


def point(word: str, runs: Sequence[Summary]) -> Point:
    """The means of several seeds."""
    windows = sum(run["windows"]["n"] for run in runs)
    return Point(
        word,
        statistics.fmean(run["attainment_offered"] for run in runs),
        statistics.fmean(run["gpu_hours"] for run in runs),
        sum(run["windows"]["passed"] for run in runs) / windows if windows else None,
    )


# -------------------------------------------------------------------- judging


def front(points: Iterable[Point]) -> list[Point]:
    """Those that none beats at no higher cost, cheapest first."""
    best: list[Point] = []
    for one in sorted(points, key=lambda one: (one.gpu_hours, -one.attainment, one.word)):
        if not best or one.attainment > best[-1].attainment:
            best.append(one)
    return best


def best_at(points: Iterable[Point], gpu_hours: float) -> Point | None:
    """The one that attains most at no more GPU-hours."""
    affordable = [one for one in points if one.gpu_hours <= gpu_hours]
    return max(affordable, key=lambda one: (one.attainment, -one.gpu_hours), default=None)


def behind(own: Point, points: Iterable[Point], at_cost: float = 1.0) -> float:
    """By how much the best at `at_cost` times our GPU-hours attains more; -inf: none costs so little.

    Within x points and y % means that `behind(own, points, 1 / (1 + y))` is at most x.
    """
    best = best_at(points, own.gpu_hours * at_cost)
    return -math.inf if best is None else best.attainment - own.attainment


def cheapest(points: Iterable[Point], attainment: float = 0.0, windows: float = 0.0) -> Point | None:
    """The cheapest that attains so much, and passes so large a share of the windows where there are any."""
    good = [one for one in points if one.attainment >= attainment and (one.windows is None or one.windows >= windows)]
    return min(good, key=lambda one: (one.gpu_hours, -one.attainment), default=None)


# -------------------------------------------------------------------- comparing


def compares(text: str) -> bool:
    """Whether a policy's word is that of a comparison."""
    name, _, rest = text.partition(":")
    planned = name == "clairvoyant" and any(word.startswith("plan=") for word in rest.split(","))
    return name in COMPARISONS and not planned


def several(text: str) -> bool:
    """Whether a word may stand for more than one policy."""
    return compares(text) and text.partition(":")[0] == "follower-frontier"


def words(text: str, ground: Ground, play: Play, seeds: Sequence[int] = (0,)) -> list[str]:
    """The policies that a comparison comes to; any other policy is itself.

    `follower-frontier`: those of the front, with the operator's model for admission. `hindsight`: the cheapest follower
    with any admission that keeps the promise over all requests and passes `windows` (0.99) of the windows; or, with
    `gpu-hours`, the one that attains most at no more. `clairvoyant`: the cheapest schedule found that attains
    `attainment` (0.99), with `cap` or `gated` as a follower. `runs`: of the first pass (40). Where nothing attains
    that, it is what attains most. Raises BadInput, where nothing costs as little as `gpu-hours` too.
    """
    name, _, rest = text.partition(":")
    if not compares(text):
        return [text]
    options, field = Options(f"--policy {text}", rest), Field(play, seeds)
    runs = options.count("runs", _RUNS, least=1)
    if name == "clairvoyant":
        attainment = options.number("attainment", _KEEPS, most=1.0)
        admission = options.text("cap", ""), options.text("gated", "")
        options.end()
        suffix = "".join(f",{key}={value}" for key, value in zip(("cap", "gated"), admission, strict=True) if value)
        return [achievable(ground, field, attainment, runs, suffix).word]
    if name == "follower-frontier":
        options.end()
        return [one.word for one in front(one for one in followers(ground, field, runs) if "cap=" not in one.word)]
    windows, gpu_hours = options.number("windows", _KEEPS, most=1.0), options.number("gpu-hours", 0.0)
    options.end()
    tried = followers(ground, field, runs)
    if gpu_hours:
        return [_affordable(text, tried, gpu_hours).word]
    found = cheapest(tried, _promised(ground.scene), windows)
    return [(found or max(tried, key=lambda one: one.attainment)).word]


def _affordable(text: str, tried: Sequence[Point], gpu_hours: float) -> Point:
    found = best_at(tried, gpu_hours)
    if found is None:
        least = min(one.gpu_hours for one in tried)
        raise BadInput(f"--policy {text}: the cheapest follower that was run costs {least:.4g} GPU-hours")
    return found


def followers(ground: Ground, field: Field, runs: int) -> list[Point]:
    """Followers with a cap, and those near the front of these with each other admission too."""
    caps = [_cap(share, ground.scene) for share in CAPS]
    screened = screen.followers(ground, runs).words
    tried = field.points(f"{word},cap={caps[0]}" for word in screened)
    bare = [one.word.rpartition(",")[0] for one in _near(tried)]
    admissions = [*(f"cap={cap}" for cap in dict.fromkeys(caps[1:])), "gated=1"]
    return tried + field.points(f"{word},{admission}" for admission in admissions for word in bare)


def _near(tried: Sequence[Point]) -> Sequence[Point]:
    """Of the front, evenly over it; where it has too few, with those that are least behind it."""
    best = front(tried)
    if len(best) >= _NEAR:
        return [best[n * (len(best) - 1) // (_NEAR - 1)] for n in range(_NEAR)]
    others = sorted((one for one in tried if one not in best), key=lambda one: (behind(one, tried), one.gpu_hours))
    return (*best, *others[: _NEAR - len(best)])


def _cap(share: float, scene: Scene) -> int:
    """A share of the most, and at least one for each gateway."""
    return max(scene.gateways, round(share * most_resident(scene)))


def most_resident(scene: Scene) -> float:
    """Sequences with which a mean replica that also reads their prompts just keeps the time of each token.

    With n residents that stay for O target seconds, it reads n / (O target) prompts of w_p seconds a second, and a
    token takes (base + n s) / (1 - n w_p / (O target)), so that n = (target - base) / (s + w_p / O). Slots and cache
    limit it too.
    """
    own = scene.plant.profile
    role = next(role for role in scene.bounds if role is not Role.PREFILL)
    asked, c = scene.asked or (), scene.plant.of_role(role).coefficients
    if not asked:
        return float(own.max_num_seqs)
    prompt, output = (
        statistics.fmean(getattr(one, name) for one in asked) for name in ("prompt_tokens", "output_tokens")
    )
    context = prompt + output / 2
    most = min(own.max_num_seqs, own.kv_tokens / context)
    if scene.slo is None or scene.slo.tpot_s is None:
        return most
    work = Work(scene.plant, scene.bounds)
    each = statistics.fmean(work.seconds(role, one) for one in asked) / output
    return max(1.0, min(most, (scene.slo.tpot_s - c.base) / each))


def achievable(ground: Ground, field: Field, attainment: float, runs: int, admission: str = "") -> Point:
    """The cheapest schedule found that attains so much, or the one that attains most; half the runs are for shaping."""
    cap = f",cap={_cap(CAPS[0], ground.scene)}"
    suffix = admission or cap
    tried = field.points(word + suffix for word in screen.plans(ground, max(1, runs // 2)).words)
    best = cheapest(tried, attainment)
    if best is None:
        return max(tried, key=lambda one: (one.attainment, -one.gpu_hours))
    refused: set[str] = set()
    for _ in range(runs - len(tried)):
        word = next((one for one in _less(best.word, suffix, ground) if one not in refused), None)
        if word is None:
            break
        [one] = field.points([word])
        if one.attainment >= attainment and one.gpu_hours < best.gpu_hours:
            best = one
        else:
            refused.add(word)
    return best


def _less(word: str, suffix: str, ground: Ground) -> Iterator[str]:
    """The same schedule with one thing less, what saves most first."""
    text = word.removesuffix(suffix).partition("plan=")[2]
    plan = clairvoyant.read(text, len(ground.scene.bounds))
    assert plan is not None
    least = [bounds[0] for bounds in ground.scene.bounds.values()]
    ends_s = [*(at_s for at_s, _ in plan[1:]), ground.length_s]
    found: list[tuple[float, str]] = []
    for n, ((at_s, counts), end_s) in enumerate(zip(plan, ends_s, strict=True)):
        for tier, count in enumerate(counts):
            if count > least[tier]:
                fewer = (*counts[:tier], count - 1, *counts[tier + 1 :])
                found.append((end_s - at_s, _worded((*plan[:n], (at_s, fewer), *plan[n + 1 :]), suffix)))
        for moved_s in _SOONER_S if n else ():
            before = plan[n - 1][1]
            saved = sum(counts) - sum(before)
            other_s = at_s + moved_s if saved > 0 else at_s - moved_s
            if saved and plan[n - 1][0] < other_s < end_s:
                moved = (*plan[:n], (other_s, counts), *plan[n + 1 :])
                found.append((abs(saved) * moved_s, _worded(moved, suffix)))
    for _, one in sorted(found, key=lambda one: (-one[0], one[1])):
        yield one


def _worded(plan: clairvoyant.Plan, suffix: str) -> str:
    kept = [step for n, step in enumerate(plan) if not n or step[1] != plan[n - 1][1]]
    return f"clairvoyant:plan={clairvoyant.written(tuple(kept))}{suffix}"


def _promised(scene: Scene) -> float:
    return 0.0 if scene.slo is None else scene.slo.share
