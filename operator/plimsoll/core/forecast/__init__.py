"""A tier's demand over the next start-up: the state that takes samples, forecast, quantile and spare. Pure."""

from plimsoll.core.forecast.noise import dispersion
from plimsoll.core.forecast.past import has_past, replay, with_past
from plimsoll.core.forecast.pauses import Pause, Pauses
from plimsoll.core.forecast.predict import Forecast, forecast
from plimsoll.core.forecast.risk import RiskControl
from plimsoll.core.forecast.spare import MISS_COST, Odds, SpareWorth, is_worth, odds, spare_replicas, spare_worth
from plimsoll.core.forecast.state import State, Unknown, observe, rescaled
from plimsoll.core.forecast.stored import from_dict, to_dict

__all__ = [
    "MISS_COST",
    "Forecast",
    "Odds",
    "Pause",
    "Pauses",
    "RiskControl",
    "SpareWorth",
    "State",
    "Unknown",
    "dispersion",
    "forecast",
    "from_dict",
    "has_past",
    "is_worth",
    "observe",
    "odds",
    "replay",
    "rescaled",
    "spare_replicas",
    "spare_worth",
    "to_dict",
    "with_past",
]
