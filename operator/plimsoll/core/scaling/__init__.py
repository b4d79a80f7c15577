"""How many replicas each tier should have.

One pure function from what is known to a decision that explains itself. The status, the Event and the log line are
renderings of the decision's steps; nothing is decided anywhere else.

A tick of many services: a `forecast` for each tier over its ledger's horizon and the tick; one call of `needs` for all
of them; then `decide` for each service, whose state belongs into its next observation. A tier's line is made anew
(`lines`) when its model, mix, limits or `tail_scale` have changed.
"""

from plimsoll.core.scaling.deciding import decide
from plimsoll.core.scaling.decision import Decision, Limit, Step, TierDecision
from plimsoll.core.scaling.observation import Demand, Measured, Need, Observation, TierObservation, summed
from plimsoll.core.scaling.policy import Mode, Policy, RateLimit, TierPolicy, Window
from plimsoll.core.scaling.sized import Ask, Line, lines, needs
from plimsoll.core.scaling.state import Mark, Returns, State, TierState, from_dict, to_dict

__all__ = [
    "Ask",
    "Decision",
    "Demand",
    "Limit",
    "Line",
    "Mark",
    "Measured",
    "Mode",
    "Need",
    "Observation",
    "Policy",
    "RateLimit",
    "Returns",
    "State",
    "Step",
    "TierDecision",
    "TierObservation",
    "TierPolicy",
    "TierState",
    "Window",
    "decide",
    "from_dict",
    "lines",
    "needs",
    "summed",
    "to_dict",
]
