"""A posterior as a small dictionary for the service's checkpoint, and back.

Problem: a restart must keep what hours of traffic have taught. It must not accept the state of another engine, another
prior or another release, or an edited document.

Idea: the dictionary names the engine and has the prior that its numbers are relative to. Anything that does not match
exactly raises ValueError, and the caller starts from the prior.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass, replace
from typing import Annotated, Any, Final, NamedTuple, TypeAlias

import numpy as np

from plimsoll.core import codec
from plimsoll.core.codec import Length, Number
from plimsoll.core.engine_model.calibration.posterior_model import (
    FACTOR_COUNT,
    TRIANGLE_SIZE,
    Posterior,
    information_matrix,
    initial_posterior,
)
from plimsoll.core.engine_model.step_time import StepModel

_PRIOR_TOLERANCE: Final = 1e-8  # relative rounding error of a prior's coefficient
# The information of a weak direction is a small difference of large sums. All values stay far below the limit.
_Sum: TypeAlias = Annotated[float, Number(-1e9, 1e9, digits=10)]
_Weight: TypeAlias = Annotated[float, Number(0.0, 1e9, digits=10)]


@dataclass(frozen=True, slots=True)
class EngineKey:
    """What a calibration applies to. parallelism: such as "tp2"; engine_version: of the build, such as
    "vllm 0.26.0".
    """

    model: str
    accelerator: str
    parallelism: str
    engine_version: str


@codec.stored_as("a calibration", version=1, updated_s="updatedSeconds")
class _Stored(NamedTuple):
    """The document. noise: weight and sum. shift: up and down."""

    engine: EngineKey
    prior: tuple[_Sum, _Sum, _Sum, _Sum, _Sum, _Sum]
    updated_s: float | None
    information: Annotated[tuple[_Sum, ...], Length(TRIANGLE_SIZE, TRIANGLE_SIZE)]
    moment: Annotated[tuple[_Sum, ...], Length(FACTOR_COUNT, FACTOR_COUNT)]
    weight: _Weight
    noise: tuple[_Weight, _Weight]
    shift: tuple[_Weight, _Weight]


def to_dict(posterior: Posterior, key: EngineKey) -> dict[str, Any]:
    """Return a dictionary of strings, numbers and lists of numbers, about 1 KB as JSON."""
    noise, shift = (posterior.noise_weight, posterior.noise_sum), (posterior.shift_up, posterior.shift_down)
    sums = posterior.updated_s, posterior.information, posterior.moment, posterior.weight
    stored: dict[str, Any] = codec.encode(_Stored(key, astuple(posterior.prior), *sums, noise, shift))
    return stored


def from_dict(
    data: object, key: EngineKey, prior: StepModel, floor: StepModel, half_life_s: float = 1800.0
) -> Posterior:
    """Return the posterior that `to_dict` stored for this engine and this prior.

    Raises ValueError, with the reason, for anything else; and the errors of `initial_posterior`.
    """
    initial = initial_posterior(prior, floor, half_life_s)
    stored = codec.decode(_Stored, data)
    if stored.engine != key:
        raise ValueError(f"this calibration is of {stored.engine}, not of {key}")
    if not np.allclose(stored.prior, astuple(prior), rtol=_PRIOR_TOLERANCE, atol=0):
        raise ValueError("this calibration is relative to another prior")
    parsed = replace(
        initial,
        updated_s=stored.updated_s,
        information=stored.information,
        moment=stored.moment,
        weight=stored.weight,
        noise_weight=stored.noise[0],
        noise_sum=stored.noise[1],
        shift_up=stored.shift[0],
        shift_down=stored.shift[1],
    )
    _validate_sums(parsed)
    return parsed


def _validate_sums(posterior: Posterior) -> None:
    """Raise ValueError unless the sums of products match the weight (shares sum to one) and are
    positive semidefinite.
    """
    total = information_matrix(posterior)
    if not math.isclose(total[:6, :6].sum(), posterior.weight, rel_tol=1e-6, abs_tol=1e-6):
        raise ValueError("a calibration's information does not add up to its weight")
    if np.linalg.eigvalsh(total).min() < -1e-6 * (1 + posterior.weight):
        raise ValueError("a calibration's information is not a sum of squares")
