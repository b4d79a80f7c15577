"""A posterior as a small dictionary for a service's status, and back.

Problem: a restart must not forget what hours of traffic taught, and must not believe what another engine, another
prior or another release of this code has written, or what somebody edited by hand.

Idea: the dictionary names the engine and carries the prior that its numbers are relative to. Whatever does not fit to
the last detail is refused with ValueError, and the caller starts from the prior.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any, Final

import numpy as np

from plimsoll.core.engine_model.calibration.posterior_model import (
    FACTOR_COUNT,
    TRIANGLE_SIZE,
    Posterior,
    information_matrix,
    initial_posterior,
)
from plimsoll.core.engine_model.step_time import StepModel
from plimsoll.core.units import round_significant

VERSION: Final = 1

_SIGNIFICANT_DIGITS: Final = 10  # the information of a weak direction is a small difference of large sums
_PRIOR_TOLERANCE: Final = 1e-8  # relative: what rounding may do to a prior's coefficient
_MAX_VALUE: Final = 1e9  # windows, ratios and deviations stay far below
_FIELDS: Final = frozenset(
    ("version", "engine", "prior", "updatedSeconds", "information", "moment", "weight", "noise", "shift")
)


@dataclass(frozen=True, slots=True)
class EngineKey:
    """What a calibration holds for. parallelism: such as `tp2`; engine_version: of the build, such as `vllm 0.26.0`."""

    model: str
    accelerator: str
    parallelism: str
    engine_version: str


def to_dict(posterior: Posterior, key: EngineKey) -> dict[str, Any]:
    """A dictionary of strings, numbers and lists of numbers, about 1 KB as JSON."""
    return {
        "version": VERSION,
        "engine": list(astuple(key)),
        "prior": _rounded(astuple(posterior.prior)),
        "updatedSeconds": posterior.updated_s,
        "information": _rounded(posterior.information),
        "moment": _rounded(posterior.moment),
        "weight": _rounded([posterior.weight])[0],
        "noise": _rounded([posterior.noise_weight, posterior.noise_sum]),
        "shift": _rounded([posterior.shift_up, posterior.shift_down]),
    }


def from_dict(
    data: object, key: EngineKey, prior: StepModel, floor: StepModel, half_life_s: float = 1800.0
) -> Posterior:
    """The posterior that `to_dict` wrote for this engine and this prior.

    Raises ValueError, with the reason, for anything else; and what `unknown` raises.
    """
    initial = initial_posterior(prior, floor, half_life_s)
    if not isinstance(data, Mapping) or data.keys() != _FIELDS:
        raise ValueError("a calibration has exactly the fields " + ", ".join(sorted(_FIELDS)))
    if data["version"] != VERSION:
        raise ValueError(f"this calibration is of version {data['version']!r}, not {VERSION}")
    if data["engine"] != list(astuple(key)):
        raise ValueError(f"this calibration is of {data['engine']!r}, not of {key}")
    if not np.allclose(_parse_numbers(data["prior"], 6), astuple(prior), rtol=_PRIOR_TOLERANCE, atol=0):
        raise ValueError("this calibration is relative to another prior")
    (weight,) = _parse_numbers([data["weight"]], 1)
    noise_weight, noise_sum = _parse_numbers(data["noise"], 2)
    shift_up, shift_down = _parse_numbers(data["shift"], 2)
    if min(weight, noise_weight, noise_sum, shift_up, shift_down) < 0:
        raise ValueError("a calibration's weights are not negative")
    parsed = replace(
        initial,
        updated_s=None if data["updatedSeconds"] is None else _parse_numbers([data["updatedSeconds"]], 1, math.inf)[0],
        information=_parse_numbers(data["information"], TRIANGLE_SIZE),
        moment=_parse_numbers(data["moment"], FACTOR_COUNT),
        weight=weight,
        noise_weight=noise_weight,
        noise_sum=noise_sum,
        shift_up=shift_up,
        shift_down=shift_down,
    )
    _validate_sums(parsed)
    return parsed


def _validate_sums(posterior: Posterior) -> None:
    """Shares sum to one, so the sums of their products sum to the weight; and no such sum has a negative direction."""
    total = information_matrix(posterior)
    if not math.isclose(total[:6, :6].sum(), posterior.weight, rel_tol=1e-6, abs_tol=1e-6):
        raise ValueError("a calibration's information does not add up to its weight")
    if np.linalg.eigvalsh(total).min() < -1e-6 * (1 + posterior.weight):
        raise ValueError("a calibration's information is not a sum of squares")


def _rounded(numbers: Sequence[float]) -> list[float]:
    return [round_significant(number, _SIGNIFICANT_DIGITS) for number in numbers]


def _parse_numbers(values: object, count: int, largest: float = _MAX_VALUE) -> tuple[float, ...]:
    if not isinstance(values, list) or len(values) != count:
        raise ValueError(f"{values!r:.80} is not a list of {count} numbers")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < largest:
            raise ValueError(f"{value!r:.80} is not a number that a calibration holds")
    return tuple(float(value) for value in values)
