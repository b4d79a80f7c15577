"""How often a replica that was no longer needed was needed again too soon for its going to have paid.

Problem: the odds of a leap are of all hours alike. Load that was there a moment ago comes back more often than any load
leaps by as much, and bursts that come in rows found the fleet given back between them.

Idea: each replica that has served a need of its own and is no longer needed is one trial, from then on and whether it
is given back meanwhile or not, so that what is counted does not depend on what was done. It was needed after all where
the need reaches it again within two start-ups; a later return is not told from growth. The odds of a leap are the
prior, worth one trial (the mean of a Beta posterior), and the least: a few trials without a return make no leap rarer.
What a load that climbs has ordered too early, or in reserve, is no trial, since the need had not been there.
"""

from __future__ import annotations

from typing import Final

from plimsoll.core.scaling.state import MOST_KEPT, Mark, Returns

STARTS: Final = 2.0  # start-ups within which a return is counted, and for which one is waited at most
KEEP: Final = 31.0 / 32.0  # of what is known when more is learned, as of pauses


def chance(returns: Returns, prior: float) -> float:
    """Probability that a need returns. prior: that load leaps there by its odds."""
    return max(prior, (prior + returns.again) / (1.0 + returns.trials))


def seen(returns: Returns) -> float:
    """The part of that probability which was seen: what the odds of a leap say besides is the reserve's matter."""
    return returns.again / (1.0 + returns.trials)


def tried(
    returns: Returns, before: int, ready: int, need: int, release: int, least: int, start_s: float, now_s: float
) -> Returns:
    """The trials after one more look at a tier whose demand is known.

    before, ready: replicas ordered, and able to serve. need: fewest that carry the forecast. release: what may be left.
    least: that is always there; the last replica is another question. start_s: of a replica.
    """
    served = max(min(returns.served, before), min(need, ready))
    low = max(release, least, 1)
    if not returns.idle and low >= served:  # mostly
        return returns if served == returns.served else returns._replace(served=served)
    idle, again = _again(returns.idle, need, now_s)
    idle, over, served = _over(idle, now_s - STARTS * start_s, served)
    if low < (idle[-1].replicas if idle else served):
        idle = [*(idle or [Mark(served, now_s)]), Mark(low, now_s)][-MOST_KEPT:]
    fade = KEEP if again or over else 1.0
    return Returns(tuple(idle), served, fade * returns.trials + again + over, fade * returns.again + again)


def _again(idle: tuple[Mark, ...], need: int, now_s: float) -> tuple[list[Mark], int]:
    """What is still idle, and how many replicas are needed again."""
    left, again = [Mark(mark.replicas, min(mark.since_s, now_s)) for mark in idle], 0  # a clock that was set back
    while len(left) > 1 and left[-1].replicas < need:
        low = left.pop()
        reached = min(need, left[-1].replicas)
        again += reached - low.replicas
        if reached < left[-1].replicas:
            left.append(Mark(reached, low.since_s))
    return (left if len(left) > 1 else []), again


def _over(idle: list[Mark], begun_s: float, served: int) -> tuple[list[Mark], int, int]:
    """What is idle since begun_s or later, for how many it has been longer, and what has served but for those: they
    are tried anew once a need has reached them again."""
    over = 0
    while len(idle) > 1 and idle[1].since_s < begun_s:
        over += idle[0].replicas - idle[1].replicas
        served = min(served, idle[1].replicas)
        idle = idle[1:]
    return (idle if len(idle) > 1 else []), over, served
