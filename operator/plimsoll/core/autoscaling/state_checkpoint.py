"""Checkpoint of a service's autoscaler state as a small document.

Problem: a new process must keep learned speeds, request lengths, start-up times and daily patterns. It must not accept
an invalid document or one of another version.

Idea: a checkpoint is a table of parts, each of which `codec` writes and checks. An invalid part is reset; the others
are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, Final, Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np

from plimsoll.core import codec
from plimsoll.core.autoscaling.capacity_state import CapacityState
from plimsoll.core.autoscaling.decision_state import DecisionState
from plimsoll.core.autoscaling.itl_limit import ItlLimit
from plimsoll.core.autoscaling.retuning_state import RetuningState
from plimsoll.core.autoscaling.service_state import ServiceState
from plimsoll.core.autoscaling.startup_models import decode_models
from plimsoll.core.autoscaling.tier_state import PRIOR_STARTUP_MODEL, TierState
from plimsoll.core.autoscaling.ttft_offset import TtftOffset
from plimsoll.core.codec import Length, Number
from plimsoll.core.demand import serialization as demand
from plimsoll.core.demand.idle_periods import IdleStats
from plimsoll.core.engine_model.calibration import serialization as calibration
from plimsoll.core.engine_model.measured_limits import MeasuredLimits
from plimsoll.core.engine_model.step_time import EngineLimits, StepModel
from plimsoll.core.types import Unavailable
from plimsoll.core.workload import Workload

SERVICE_STATE_VERSION: Final = 1
MAX_LENGTHS: Final = 512  # rows of a workload; one of full histograms has fewer
_Column: TypeAlias = Annotated[tuple[Annotated[float, Number(0.0, 1e8, digits=4)], ...], Length(1, MAX_LENGTHS)]
_Times: TypeAlias = Mapping[str, Annotated[int, Number(0, 1e11)]]  # seconds since the epoch


@codec.stored_as("request lengths")
class _Lengths(NamedTuple):
    """The columns of a `Workload`."""

    uncached_tokens: _Column
    cached_tokens: _Column
    output_tokens: _Column
    weights: _Column


@codec.stored_as("limits of engines")
class _Limits(NamedTuple):
    announced: EngineLimits
    measured: MeasuredLimits


@codec.stored_as("a step-time model")
class _Speed(NamedTuple):
    """What a calibration is of. It is stored next to this, as `learned`."""

    engine: calibration.EngineKey
    prior: StepModel
    floor: StepModel


S = TypeVar("S", ServiceState, TierState)


class _Part(NamedTuple, Generic[S]):
    """A part of the document. dump: None if nothing is known. restore: raises ValueError for an invalid part."""

    key: str
    dump: Callable[[S], Any]
    restore: Callable[[S, Any], None]


def dump_service_state(service: ServiceState) -> dict[str, Any]:
    """Return the state as a JSON document, about 10 KB per tier with history."""
    tiers = {name: _dump(_TIER_PARTS, tier) for name, tier in service.tiers.items()}
    return {"version": SERVICE_STATE_VERSION, **_dump(_SERVICE_PARTS, service), "tiers": tiers}


def restore_service_state(service: ServiceState, stored: Any) -> None:
    """Restore a stored document part by part, and ignore invalid parts."""
    if not isinstance(stored, Mapping) or stored.get("version") != SERVICE_STATE_VERSION:
        return
    _restore(_SERVICE_PARTS, service, stored)
    tiers = stored.get("tiers")
    for name, tier in service.tiers.items():
        _restore(_TIER_PARTS, tier, tiers.get(name) if isinstance(tiers, Mapping) else None)


def _dump(parts: Sequence[_Part[S]], state: S) -> dict[str, Any]:
    return {part.key: part.dump(state) for part in parts}


def _restore(parts: Sequence[_Part[S]], state: S, stored: Any) -> None:
    if isinstance(stored, Mapping):
        for part in parts:
            with suppress(ValueError):
                part.restore(state, stored.get(part.key))


def _dump_lengths(service: ServiceState) -> Any:
    """Request lengths and their weights, at most MAX_LENGTHS of each; the heaviest are kept."""
    workload = service.workload
    if isinstance(workload, Unavailable):
        return None
    heaviest = np.sort(np.argsort(-workload.weights, kind="stable")[:MAX_LENGTHS])
    return codec.encode(_Lengths(*(getattr(workload, name)[heaviest].tolist() for name in _Lengths._fields)))


def _restore_lengths(service: ServiceState, stored: Any) -> None:
    uncached, cached, output, weights = (np.array(column) for column in codec.decode(_Lengths, stored))
    total = float(weights.sum())
    if not total > 0.0:
        raise ValueError("the weights sum to 0")
    service.workload = Workload(uncached, cached, output, weights / total)


def _dump_noticed(service: ServiceState) -> Any:
    return codec.encode({name: int(at_s) for name, at_s in service.class_targets.noticed_s.items()}, _Times)


def _restore_noticed(service: ServiceState, stored: Any) -> None:
    times: Any = _Times
    service.class_targets.noticed_s = codec.decode(times, stored)


def _dump_offset(service: ServiceState) -> Any:
    return None if (offset := service.ttft_feedback.offset) is None else codec.encode(offset)


def _restore_offset(service: ServiceState, stored: Any) -> None:
    service.ttft_feedback.offset = codec.decode(TtftOffset, stored)


def _restore_idle_stats(service: ServiceState, stored: Any) -> None:
    service.activity.idle_stats = codec.decode(IdleStats, stored)


def _restore_decision_state(service: ServiceState, stored: Any) -> None:
    service.decision_state = codec.decode(DecisionState, stored)


def _restore_retuning(service: ServiceState, stored: Any) -> None:
    service.retuning = codec.decode(RetuningState, stored)


_SERVICE_PARTS: Final = (
    _Part("scaling", lambda service: codec.encode(service.decision_state), _restore_decision_state),
    _Part("ttft_offset", _dump_offset, _restore_offset),
    _Part("pauses", lambda service: codec.encode(service.activity.idle_stats), _restore_idle_stats),
    _Part("retuning", lambda service: codec.encode(service.retuning), _restore_retuning),
    _Part("lengths", _dump_lengths, _restore_lengths),
    _Part("noticed_classes", _dump_noticed, _restore_noticed),
)


def _restore_startups(tier: TierState, stored: Any) -> None:
    tier.startup_models = decode_models(stored, PRIOR_STARTUP_MODEL)


def _restore_demand(tier: TierState, stored: Any) -> None:
    tier.forecast_state = demand.from_dict(stored)


def _dump_limits(tier: TierState) -> Any:
    announced = tier.engines.announced
    return None if announced is None else codec.encode(_Limits(announced, tier.engines.measured_limits))


def _restore_limits(tier: TierState, stored: Any) -> None:
    tier.engines.announced, tier.engines.measured_limits = codec.decode(_Limits, stored)


def _restore_itl_limit(tier: TierState, stored: Any) -> None:
    tier.itl_limit = codec.decode(ItlLimit, stored)


def _dump_speed(tier: TierState) -> Any:
    key, posterior = tier.engines.engine_key, tier.engines.posterior
    if posterior is None or key is None:
        return None
    speed = codec.encode(_Speed(key, posterior.prior, posterior.floor))
    return {**speed, "learned": calibration.to_dict(posterior, key)}


def _restore_speed(tier: TierState, stored: Any) -> None:
    speed = codec.decode(_Speed, stored)
    tier.engines.posterior = calibration.from_dict(stored.get("learned"), speed.engine, speed.prior, speed.floor)
    tier.engines.engine_key, tier.capacity_state = speed.engine, CapacityState()


_TIER_PARTS: Final = (
    _Part("starts", lambda tier: codec.encode(tier.startup_models), _restore_startups),
    _Part("demand", lambda tier: demand.to_dict(tier.forecast_state), _restore_demand),
    _Part("speed", _dump_speed, _restore_speed),
    _Part("limits", _dump_limits, _restore_limits),
    _Part("itl_limit", lambda tier: codec.encode(tier.itl_limit), _restore_itl_limit),
)
