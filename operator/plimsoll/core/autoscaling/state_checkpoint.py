"""Checkpoint of a service's autoscaler state as a small document.

Problem: a new process must keep learned speeds, request lengths, start-up times and daily patterns. It must not accept
an invalid document or one of another version.

Idea: each part is stored with its version and validates itself. An invalid part is reset; the others are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import astuple, fields
from typing import Any, Final

import numpy as np

from plimsoll.core import codec
from plimsoll.core.autoscaling.decision_state import DecisionState
from plimsoll.core.autoscaling.itl_limit import ItlLimit
from plimsoll.core.autoscaling.retuning_state import RetuningState
from plimsoll.core.autoscaling.service_state import ServiceState
from plimsoll.core.autoscaling.startup_models import decode_models
from plimsoll.core.autoscaling.tier_state import NO_REQUEST_LENGTHS, PRIOR_STARTUP_MODEL, TierState
from plimsoll.core.autoscaling.ttft_offset import TtftOffset
from plimsoll.core.demand import serialization as demand
from plimsoll.core.demand.idle_periods import IdleStats
from plimsoll.core.engine_model.calibration import serialization as calibration
from plimsoll.core.engine_model.measured_limits import MeasuredLimits
from plimsoll.core.engine_model.step_time import EngineLimits, StepModel
from plimsoll.core.types import Unavailable
from plimsoll.core.units import round_significant
from plimsoll.core.workload import Workload

SERVICE_STATE_VERSION: Final = 1
MAX_LENGTHS: Final = 512  # rows of a workload; one of full histograms has fewer
LENGTH_DIGITS: Final = 4
MAX_LENGTH_TOKENS: Final = 1e8
MAX_TIME_S: Final = 1e11
_LENGTHS: Final = ("uncached_tokens", "cached_tokens", "output_tokens", "weights")


def dump_service_state(service: ServiceState) -> dict[str, Any]:
    """Return the state as a JSON document, about 10 KB per tier with history."""
    return {
        "version": SERVICE_STATE_VERSION,
        "scaling": codec.encode(service.decision_state),
        "ttft_offset": None if (offset := service.ttft_feedback.offset) is None else codec.encode(offset),
        "pauses": codec.encode(service.idle_stats),
        "retuning": codec.encode(service.retuning),
        "lengths": None if isinstance(service.workload, Unavailable) else _dump_lengths(service.workload),
        "noticed_classes": {name: int(at_s) for name, at_s in service.class_targets.noticed_s.items()},
        "tiers": {name: _dump_tier(tier) for name, tier in service.tiers.items()},
    }


def restore_service_state(service: ServiceState, stored: Any) -> None:
    """Restore a stored document part by part, and ignore invalid parts."""
    if not isinstance(stored, Mapping) or stored.get("version") != SERVICE_STATE_VERSION:
        return
    with suppress(ValueError):
        service.decision_state = codec.decode(DecisionState, stored.get("scaling"))
    with suppress(ValueError):
        service.ttft_feedback.offset = codec.decode(TtftOffset, stored.get("ttft_offset"))
    with suppress(ValueError):
        service.idle_stats = codec.decode(IdleStats, stored.get("pauses"))
    with suppress(ValueError):
        service.retuning = codec.decode(RetuningState, stored.get("retuning"))
    with suppress(ValueError):
        service.workload = _restore_lengths(stored.get("lengths"))
    with suppress(ValueError):
        service.class_targets.noticed_s = _restore_noticed(stored.get("noticed_classes"))
    tiers = stored.get("tiers")
    for name, tier in service.tiers.items():
        if isinstance(tiers, Mapping) and isinstance(tiers.get(name), Mapping):
            _restore_tier(tier, tiers[name])


def _dump_lengths(workload: Workload) -> dict[str, list[float]]:
    """Request lengths and their weights, at most MAX_LENGTHS of each; the heaviest are kept."""
    heaviest = np.sort(np.argsort(-workload.weights, kind="stable")[:MAX_LENGTHS])
    columns = {name: getattr(workload, name)[heaviest] for name in _LENGTHS}
    return {
        name: [round_significant(float(value), LENGTH_DIGITS) for value in column] for name, column in columns.items()
    }


def _restore_lengths(stored: Any) -> Workload:
    """The inverse of `_dump_lengths`. Raises ValueError for anything else."""
    if not isinstance(stored, Mapping):
        raise ValueError("no request lengths")
    columns = {}
    for name in _LENGTHS:
        column = stored.get(name)
        if not isinstance(column, list) or not 0 < len(column) <= MAX_LENGTHS:
            raise ValueError(f"{name} is no list of request lengths")
        if not all(type(value) in (int, float) and 0.0 <= value <= MAX_LENGTH_TOKENS for value in column):
            raise ValueError(f"{name} has a value that is no length")
        columns[name] = np.array(column, dtype=float)
    total = float(columns["weights"].sum())
    if not total > 0.0:
        raise ValueError("the weights sum to 0")
    return Workload(**(columns | {"weights": columns["weights"] / total}))


def _restore_noticed(stored: Any) -> dict[str, float]:
    """Times by request class, seconds since the epoch. Raises ValueError for anything else."""
    if not isinstance(stored, Mapping):
        raise ValueError("no request classes")
    if not all(type(at_s) in (int, float) and 0.0 <= at_s <= MAX_TIME_S for at_s in stored.values()):
        raise ValueError("a request class has a value that is no time")
    return dict(stored)


def _dump_tier(tier: TierState) -> dict[str, Any]:
    speed_model = None
    if tier.posterior is not None and tier.engine_key is not None:
        speed_model = {
            "engine": codec.encode(tier.engine_key),
            "prior": codec.encode(tier.posterior.prior),
            "floor": codec.encode(tier.posterior.floor),
            "learned": calibration.to_dict(tier.posterior, tier.engine_key),
        }
    return {
        "starts": codec.encode(tier.startup_models),
        "demand": demand.to_dict(tier.forecast_state),
        "speed": speed_model,
        "itl_limit": codec.encode(tier.itl_limit),
        "limits": None if tier.announced is None else _dump_limits(tier.announced, tier.measured_limits),
    }


def _dump_limits(announced: EngineLimits, measured: MeasuredLimits) -> dict[str, Any]:
    return {"announced": list(astuple(announced)), "measured": codec.encode(measured)}


def _restore_limits(tier: TierState, stored: Any) -> None:
    """The inverse of `_dump_limits`. Raises ValueError for anything else."""
    if not isinstance(stored, Mapping) or not isinstance(announced := stored.get("announced"), list):
        raise ValueError("no limits of engines")
    if len(announced) != len(fields(EngineLimits)):
        raise ValueError("other limits of engines")
    tier.measured_limits, tier.announced = (
        codec.decode(MeasuredLimits, stored.get("measured")),
        EngineLimits(*announced),
    )


def _restore_tier(tier: TierState, stored: Mapping[str, Any]) -> None:
    with suppress(ValueError):
        tier.itl_limit = codec.decode(ItlLimit, stored.get("itl_limit"))
    with suppress(ValueError):
        _restore_limits(tier, stored.get("limits"))
    with suppress(ValueError):
        tier.startup_models = decode_models(stored.get("starts"), PRIOR_STARTUP_MODEL)
    with suppress(ValueError):
        tier.forecast_state = demand.from_dict(stored.get("demand"))
    speed_model = stored.get("speed")
    if isinstance(speed_model, Mapping):
        with suppress(ValueError):
            key = codec.decode(calibration.EngineKey, speed_model.get("engine"))
            prior, floor = (codec.decode(StepModel, speed_model.get(name)) for name in ("prior", "floor"))
            tier.posterior, tier.engine_key = calibration.from_dict(speed_model.get("learned"), key, prior, floor), key
            tier.capacity = NO_REQUEST_LENGTHS
