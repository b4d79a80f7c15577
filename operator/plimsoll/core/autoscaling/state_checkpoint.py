"""Checkpoint of a service's autoscaler state as a small document.

Problem: a new process must keep learned speeds, start-up times and daily patterns. It must not accept an invalid
document or one of another version.

Idea: each part is stored with its version and validates itself. An invalid part is reset; the others are kept.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import astuple
from typing import Any, Final

from plimsoll.core.autoscaling import startup_models
from plimsoll.core.autoscaling.decision_state import dump_decision_state as scaling_to_dict
from plimsoll.core.autoscaling.decision_state import load_decision_state as scaling_from_dict
from plimsoll.core.autoscaling.service_state import ServiceState
from plimsoll.core.autoscaling.tier_state import PRIOR_STARTUP_MODEL, TierState
from plimsoll.core.demand import idle_periods
from plimsoll.core.demand.risk_control import RiskControl
from plimsoll.core.demand.serialization import from_dict as forecast_from_dict
from plimsoll.core.demand.serialization import to_dict as forecast_to_dict
from plimsoll.core.engine_model.calibration import serialization as calibration
from plimsoll.core.engine_model.step_time import StepModel

SERVICE_STATE_VERSION: Final = 1


def dump_service_state(service: ServiceState) -> dict[str, Any]:
    """Return the state as a JSON document, about 10 KB per tier with history."""
    return {
        "version": SERVICE_STATE_VERSION,
        "scaling": scaling_to_dict(service.decision_state),
        "risk": None if service.risk is None else [service.risk.budget, service.risk.score],
        "pauses": idle_periods.to_dict(service.idle_stats),
        "tiers": {name: _dump_tier(tier) for name, tier in service.tiers.items()},
    }


def restore_service_state(service: ServiceState, stored: Any) -> None:
    """Restore a stored document part by part, and ignore invalid parts."""
    if not isinstance(stored, Mapping) or stored.get("version") != SERVICE_STATE_VERSION:
        return
    with contextlib.suppress(ValueError, KeyError):
        service.decision_state = scaling_from_dict(stored["scaling"])
    with contextlib.suppress(ValueError, KeyError, TypeError):
        budget, score = stored["risk"]
        service.risk = RiskControl(float(budget), float(score))
    with contextlib.suppress(ValueError, KeyError):
        service.idle_stats = idle_periods.from_dict(stored["pauses"])
    tiers = stored.get("tiers")
    for name, tier in service.tiers.items():
        if isinstance(tiers, Mapping) and isinstance(tiers.get(name), Mapping):
            _restore_tier(tier, tiers[name])


def _dump_tier(tier: TierState) -> dict[str, Any]:
    speed_model = None
    if tier.posterior is not None and tier.engine_key is not None:
        speed_model = {
            "engine": list(astuple(tier.engine_key)),
            "prior": list(astuple(tier.posterior.prior)),
            "floor": list(astuple(tier.posterior.floor)),
            "learned": calibration.to_dict(tier.posterior, tier.engine_key),
        }
    return {
        "starts": startup_models.to_dict(tier.startup_models),
        "demand": forecast_to_dict(tier.forecast_state),
        "speed": speed_model,
    }


def _restore_tier(tier: TierState, stored: Mapping[str, Any]) -> None:
    with contextlib.suppress(ValueError, KeyError):
        tier.startup_models = startup_models.from_dict(stored["starts"], PRIOR_STARTUP_MODEL)
    with contextlib.suppress(ValueError, KeyError):
        tier.forecast_state = forecast_from_dict(stored["demand"])
    with contextlib.suppress(ValueError, KeyError, TypeError):
        speed_model = stored["speed"]
        key = calibration.EngineKey(*map(str, speed_model["engine"]))
        prior, floor = StepModel(*speed_model["prior"]), StepModel(*speed_model["floor"])
        tier.posterior, tier.engine_key = calibration.from_dict(speed_model["learned"], key, prior, floor), key
