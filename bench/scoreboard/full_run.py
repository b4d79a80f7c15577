"""One run with all rows and all baselines: `python -m bench scoreboard --whole`.

Problem: rows times policies times machines times seeds take days of computing, and a board assembled from runs of many
versions of the program proves nothing about any of them.

Idea: the plan (`run_plan`) lists the runs in order, and each kind of baseline spends its runs where they are most
informative. Reactive baselines: the row's own load is screened for promising settings (`plimsoll.sim.screening`). These
run with a plain cap, cheapest first, until they cost more than Plimsoll. The best that do not cost more also run behind
Plimsoll's admission control, and the one that leads with one seed runs with the others. Constant fleets: from
Plimsoll's mean down to the first that attains less, or up to the first that attains as much. All of it follows from
stored runs and seeds, so a stopped plan continues where it was.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from bench.scoreboard import scoring, search, simulate_run, target_checks
from bench.scoreboard.loads import PhasedLoad
from bench.scoreboard.rows import BOARD_ROWS, RAISED_ROWS, BoardRow
from bench.scoreboard.run_plan import PlanPart
from bench.scoreboard.runner import BudgetExhausted
from bench.scoreboard.scoring import Score
from bench.scoreboard.search import RunTasks
from bench.scoreboard.simulate_run import RunTask, search_space
from plimsoll.sim import frontier

OWN_POLICY: Final = "plimsoll"
_MAX_SCREENED: Final = 40
_MAX_FOLLOWERS: Final = 20  # at least, with those that a search had left
_MAX_CAPPED: Final = 4
_MAX_LEADERS: Final = 4
_MAX_SCHEDULES: Final = 20
_ORACLE_RATE_MARGINS: Final = (0.65, 0.85)


@dataclass(frozen=True)
class RowRuns:
    """A row on a plant."""

    row: BoardRow
    plant: float
    seeds: int
    run_tasks: RunTasks

    def score(self, word: str, seeds: int = 1) -> Score:
        tasks = [RunTask(self.row, self.plant, word, seed) for seed in range(1, seeds + 1)]
        return scoring.score_policy(word, self.run_tasks(tasks))

    @property
    def name(self) -> str:
        return simulate_run.place_of(self.row.name, self.plant)


def run_plan(plan: Sequence[PlanPart], run_tasks: RunTasks) -> list[str]:
    """Plays the plan, and says what of it is not played yet, as `part: place, who`."""
    not_played: list[str] = []
    for part in plan:
        for plant, name, policy_group in itertools.product(part.plants, part.rows, part.policy_groups):
            row_runs = RowRuns(BOARD_ROWS[name], plant, part.seeds, run_tasks)
            try:
                POLICY_GROUPS.get(policy_group, _run_policy)(row_runs, policy_group)
            except BudgetExhausted:
                not_played.append(f"{part.description}: {row_runs.name}, {policy_group}")
    return not_played


def _run_policy(row_runs: RowRuns, word: str) -> None:
    row_runs.score(word, row_runs.seeds)


# -------------------------------------------------------------------- followers


def _run_followers(row_runs: RowRuns, _: str) -> None:
    nominal = row_runs.plant == 1.0
    _, at_cost = target_checks.follower_allowance(row_runs.row, nominal) or (0.0, 1.0)
    most_hours = row_runs.score(OWN_POLICY).gpu_hours.value * at_cost
    scores = [row_runs.score(word) for word in search.saved_frontier(row_runs.row)] if nominal else []
    space = {score.policy for score in scores}
    scores += (with_cap := list(_run_until_cost(row_runs, most_hours, _MAX_FOLLOWERS - _MAX_CAPPED - len(scores))))
    ordered = sorted(with_cap, key=lambda score: _affordable_first(score, most_hours))
    capped_scores = [word for score in ordered if (word := f"{score.policy.rpartition(',')[0]},gated=1") not in space]
    scores += [row_runs.score(word) for word in (*capped_scores[:_MAX_CAPPED], *_oracle_rate_followers(row_runs.row))]
    if row_runs.seeds > 1:
        _run_leaders(row_runs, at_cost, scores)


def _oracle_rate_followers(row: BoardRow) -> Iterator[str]:
    """Some that are told the rate of each moment, where a request of one moment is like that of any other."""
    phases = row.load.phases if isinstance(row.load, PhasedLoad) else ()
    if len(row.tiers) > 1 or len({phase.lengths for phase in phases}) != 1:
        return
    starts_s = itertools.accumulate((phase.seconds for phase in phases[:-1]), initial=0.0)
    rates = ";".join(f"{at_s:g}@{phase.rate:g}" for at_s, phase in zip(starts_s, phases, strict=True))
    for margin, spare in itertools.product(_ORACLE_RATE_MARGINS, (0, 1)):
        yield f"follower:margin={margin},spare={spare},hold=0,rates={rates},gated=1"


def _affordable_first(score: Score, most_hours: float) -> tuple[float, float]:
    """To sort by attainment, and those that cost more by what they cost more."""
    return max(0.0, score.gpu_hours.value - most_hours), -score.offered.value


def _run_until_cost(row_runs: RowRuns, most_hours: float, min_count: int) -> Iterator[Score]:
    """Screened ones with a cap, cheapest first, until there are enough and the last one costs more."""
    for count, word in enumerate(search.screened(row_runs.row, row_runs.plant, _MAX_SCREENED), 1):
        yield (score := row_runs.score(word))
        if count >= min_count and score.gpu_hours.value > most_hours:
            return


def _run_leaders(row_runs: RowRuns, at_cost: float, scores: Sequence[Score]) -> None:
    """Whom Plimsoll is judged by, again and again, with all seeds: who is better by most, or the cheapest as good."""
    own, by_word = row_runs.score(OWN_POLICY, row_runs.seeds), {comparison.policy: comparison for comparison in scores}
    by_cost = row_runs.plant == 1.0 and row_runs.row.targets.max_cost_ratio is not None
    for _ in range(_MAX_LEADERS):
        played = list(by_word.values())
        leaders = (
            target_checks.cheapest_equivalent(row_runs.row, own, played)
            if by_cost
            else target_checks.best_follower(own, played, at_cost)
        )
        if leaders is None or by_word[leaders.other.policy].seeds == row_runs.seeds:
            return
        by_word[leaders.other.policy] = row_runs.score(leaders.other.policy, row_runs.seeds)


# -------------------------------------------------------------------- constant fleets


def _run_constant_fleets(row_runs: RowRuns, _: str) -> None:
    """From Plimsoll's mean down while the smaller one does as well, else up until one does."""
    own = row_runs.score(OWN_POLICY, row_runs.seeds)
    mean = own.replicas.value if own.later is None else own.later
    min_count, max_count = len(row_runs.row.tiers), sum(max_count for _, _, max_count in row_runs.row.tiers)
    count = min(max_count, max(min_count, round(mean)))
    if _any_equivalent(row_runs, own, count):
        while count > min_count and _any_equivalent(row_runs, own, count - 1):
            count -= 1
    else:
        while count < max_count and not _any_equivalent(row_runs, own, count := count + 1):
            pass
    if row_runs.row.targets.max_extra_replicas is not None:
        _run_raised(row_runs, own, count)


def _any_equivalent(row_runs: RowRuns, own: Score, replicas: int) -> bool:
    """Whether one of the fleets with so many replicas does as well; all of them are played."""
    scores = [row_runs.score(word, row_runs.seeds) for word in _constant(row_runs.row, replicas)]
    if row_runs.row.compares_windows:
        return any(target_checks.meets_windows(score) for score in scores)
    return any(score.offered.value >= own.offered.value for score in scores)


def _constant(row: BoardRow, replicas: int) -> list[str]:
    each = itertools.product(*(range(1, most + 1) for _, _, most in row.tiers))
    return [f"static:{','.join(map(str, counts))}" for counts in each if sum(counts) == replicas]


def _run_raised(row_runs: RowRuns, own: Score, min_fleet: int) -> None:
    """Where Plimsoll has more than the least fleet: whether that one is just below its limit."""
    assert own.later is not None
    if own.later > min_fleet + (row_runs.row.targets.max_extra_replicas or 0.0):
        raised = RowRuns(RAISED_ROWS[row_runs.row.name], row_runs.plant, row_runs.seeds, row_runs.run_tasks)
        raised.score(f"static:{min_fleet}", row_runs.seeds)


# -------------------------------------------------------------------- the others


def _run_peers(row_runs: RowRuns, _: str) -> None:
    for word in search.peer_policies(row_runs.row):
        row_runs.score(word, row_runs.seeds)


def _run_oracles(row_runs: RowRuns, _: str) -> None:
    for word in search.oracle_policies(row_runs.row):
        row_runs.score(word, row_runs.seeds)


def _run_schedules(row_runs: RowRuns, _: str) -> None:
    """Looks for the cheapest schedule that knows the future and attains 99 % of what is offered."""

    def made(runs: Sequence[tuple[str, int]]) -> Sequence[Mapping[str, Any]]:
        return row_runs.run_tasks([RunTask(row_runs.row, row_runs.plant, word, seed) for word, seed in runs])

    space = search_space(row_runs.row, row_runs.plant, row_runs.row.load.make(1))
    frontier.expand(f"clairvoyant:runs={_MAX_SCHEDULES}", space, made, (1,))


POLICY_GROUPS: Final[Mapping[str, Callable[[RowRuns, str], None]]] = {
    "followers": _run_followers,
    "fleets": _run_constant_fleets,
    "peers": _run_peers,
    "found": _run_oracles,
    "schedules": _run_schedules,
}
