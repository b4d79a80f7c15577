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

from plimsoll.core.calibration.belief import FACTORS, TRIANGLE, Posterior, information, unknown
from plimsoll.core.latency import StepModel

VERSION: Final = 1

_DIGITS: Final = 10  # the information of a weak direction is a small difference of large sums
_SAME: Final = 1e-8  # relative: what rounding may do to a prior's coefficient
_LARGEST: Final = 1e9  # windows, ratios and deviations stay far below
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
    fresh = unknown(prior, floor, half_life_s)
    if not isinstance(data, Mapping) or data.keys() != _FIELDS:
        raise ValueError("a calibration has exactly the fields " + ", ".join(sorted(_FIELDS)))
    if data["version"] != VERSION:
        raise ValueError(f"this calibration is of version {data['version']!r}, not {VERSION}")
    if data["engine"] != list(astuple(key)):
        raise ValueError(f"this calibration is of {data['engine']!r}, not of {key}")
    if not np.allclose(_numbers(data["prior"], 6), astuple(prior), rtol=_SAME, atol=0):
        raise ValueError("this calibration is relative to another prior")
    (weight,) = _numbers([data["weight"]], 1)
    noise_weight, noise_sum = _numbers(data["noise"], 2)
    shift_up, shift_down = _numbers(data["shift"], 2)
    if min(weight, noise_weight, noise_sum, shift_up, shift_down) < 0:
        raise ValueError("a calibration's weights are not negative")
    read = replace(
        fresh,
        updated_s=None if data["updatedSeconds"] is None else _numbers([data["updatedSeconds"]], 1, math.inf)[0],
        information=_numbers(data["information"], TRIANGLE),
        moment=_numbers(data["moment"], FACTORS),
        weight=weight,
        noise_weight=noise_weight,
        noise_sum=noise_sum,
        shift_up=shift_up,
        shift_down=shift_down,
    )
    _check_sums(read)
    return read


def _check_sums(posterior: Posterior) -> None:
    """Shares sum to one, so the sums of their products sum to the weight; and no such sum has a negative direction."""
    total = information(posterior)
    if not math.isclose(total[:6, :6].sum(), posterior.weight, rel_tol=1e-6, abs_tol=1e-6):
        raise ValueError("a calibration's information does not add up to its weight")
    if np.linalg.eigvalsh(total).min() < -1e-6 * (1 + posterior.weight):
        raise ValueError("a calibration's information is not a sum of squares")


def _rounded(numbers: Sequence[float]) -> list[float]:
    return [float(f"{number:.{_DIGITS}g}") for number in numbers]


def _numbers(values: object, count: int, largest: float = _LARGEST) -> tuple[float, ...]:
    if not isinstance(values, list) or len(values) != count:
        raise ValueError(f"{values!r:.80} is not a list of {count} numbers")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < largest:
            raise ValueError(f"{value!r:.80} is not a number that a calibration holds")
    return tuple(float(value) for value in values)
