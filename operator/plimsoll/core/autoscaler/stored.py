"""What a service's autoscaler remembers, as one small dictionary, so that a restart forgets nothing.

Problem: hours of traffic have taught speeds, start-up times and the shape of the day; a new process must not begin
anew, nor believe what another release or a hand has written.

Idea: each part stores itself with its version and refuses what does not fit; a part that is refused begins anew, the
others do not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import astuple
from typing import Any, Final

from plimsoll.core import variants
from plimsoll.core.autoscaler.service import Service
from plimsoll.core.autoscaler.tier import FIRST_LEDGER, Tier
from plimsoll.core.calibration import state as calibration
from plimsoll.core.forecast import RiskControl, pauses
from plimsoll.core.forecast.stored import from_dict as forecast_from_dict
from plimsoll.core.forecast.stored import to_dict as forecast_to_dict
from plimsoll.core.latency import StepModel
from plimsoll.core.scaling.state import from_dict as scaling_from_dict
from plimsoll.core.scaling.state import to_dict as scaling_to_dict

VERSION: Final = 1


def to_dict(service: Service) -> dict[str, Any]:
    """All of it as JSON can hold it; about 10 KB a tier once there is history."""
    return {
        "version": VERSION,
        "scaling": scaling_to_dict(service.state),
        "risk": None if service.risk is None else [service.risk.budget, service.risk.score],
        "pauses": pauses.to_dict(service.pauses),
        "tiers": {name: _tier(tier) for name, tier in service.tiers.items()},
    }


def restore(service: Service, stored: Any) -> None:
    """Put back what `to_dict` gave, part by part, as far as it fits."""
    if not isinstance(stored, Mapping) or stored.get("version") != VERSION:
        return
    with contextlib.suppress(ValueError, KeyError):
        service.state = scaling_from_dict(stored["scaling"])
    with contextlib.suppress(ValueError, KeyError, TypeError):
        budget, score = stored["risk"]
        service.risk = RiskControl(float(budget), float(score))
    with contextlib.suppress(ValueError, KeyError):
        service.pauses = pauses.from_dict(stored["pauses"])
    tiers = stored.get("tiers")
    for name, tier in service.tiers.items():
        if isinstance(tiers, Mapping) and isinstance(tiers.get(name), Mapping):
            _restore(tier, tiers[name])


def _tier(tier: Tier) -> dict[str, Any]:
    speed = None
    if tier.posterior is not None and tier.key is not None:
        speed = {
            "engine": list(astuple(tier.key)),
            "prior": list(astuple(tier.posterior.prior)),
            "floor": list(astuple(tier.posterior.floor)),
            "learned": calibration.to_dict(tier.posterior, tier.key),
        }
    return {"starts": variants.to_dict(tier.starts), "demand": forecast_to_dict(tier.demand), "speed": speed}


def _restore(tier: Tier, stored: Mapping[str, Any]) -> None:
    with contextlib.suppress(ValueError, KeyError):
        tier.starts = variants.from_dict(stored["starts"], FIRST_LEDGER)
    with contextlib.suppress(ValueError, KeyError):
        tier.demand = forecast_from_dict(stored["demand"])
    with contextlib.suppress(ValueError, KeyError, TypeError):
        speed = stored["speed"]
        key = calibration.EngineKey(*map(str, speed["engine"]))
        prior, floor = StepModel(*speed["prior"]), StepModel(*speed["floor"])
        tier.posterior, tier.key = calibration.from_dict(speed["learned"], key, prior, floor), key
