"""Self-benchmark: the step model of an engine not measured under load, from its data sheet or its warm-up.

Problem: the first replicas of a model run on any accelerator, and many accelerators are in no table. Without a prior
nothing can be sized. Calibration learns factors on a prior, so it cannot start either.

Idea: an engine's warm-up times a few requests on the idle engine, the points of the self-benchmark. A step is linear,
so non-negative least squares gives the coefficients that the points show. Errors count relative to the point's own
time, so that a disturbed point that is far too slow weighs little:

- base and sequence come from the seconds per further token at some batch sizes, without HTTP; cached_token where the
  batches differ in their contexts;
- prefill_token comes from the seconds to the first token at some prompt lengths. The part that does not depend on the
  length (HTTP, and the extra of a step with prefill) is a separate constant where the batches show the base; without
  batches it is `HTTP_OVERHEAD_S`, and the base is the rest.

Coefficients that the points cannot show are 0: any_prefill (it looks like HTTP) and prefill_pair (the prompts are
short: up to 1,024 tokens attention is 3 % of an 8B's prefill on an H200). Long prompts are therefore underestimated,
and calibration does not learn a coefficient that is 0 in its prior: a roofline is the better source where there is one.
A necessary coefficient that the points do not show gets its largest possible value. A prior that is too slow costs one
replica too many until calibration corrects it. One that is too fast violates the SLO.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import astuple, replace
from types import MappingProxyType
from typing import Final

import numpy as np

from plimsoll.core.capacity.tier_model import HTTP_OVERHEAD_PER_TOKEN_S, HTTP_OVERHEAD_S
from plimsoll.core.engine_model import roofline
from plimsoll.core.engine_model.calibration.posterior_model import coefficients
from plimsoll.core.engine_model.step_time import StepModel
from plimsoll.core.ports import EngineInfo, SelfBenchmark
from plimsoll.core.types import Unavailable
from plimsoll.core.workload import FloatArray

# Share of a measured coefficient that is the floor of calibration. Self-benchmarks on a shared node have been twice too
# slow, and one point of seven that was far too slow gives 3.6 times a token's cost. A higher floor could be too high.
FLOOR_SHARE: Final = 0.25
OBSERVED_FLOOR_SHARE: Final = 0.08  # of means under load, in which requests waited for others

_MAX_POINT_S: Final = 3600.0  # longest time of a point; and the shortest
_MIN_POINT_S: Final = 1e-7
_MAX_COUNT: Final = 10_000_000  # tokens or sequences of a point
_MAX_POINTS: Final = 64  # points that are read
_MAX_HTTP_SHARE: Final = 0.5  # largest share of a point's time for HTTP
_MIN_BASE_SHARE: Final = 0.01  # of the fastest step; a smaller base is a rounding error
_CONTEXT_RATIO: Final = 8.0  # ratio of contexts from which the reading of the cache shows

# Keys are the driver's names, as in nvidia-smi; node labels have hyphens in place of spaces.
_DRIVER_NAMES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "NVIDIA-H100-80GB-HBM3": "H100-SXM",
        "NVIDIA-H200": "H200",
        "NVIDIA-A100-SXM4-80GB": "A100-80G",
        "NVIDIA-A100-80GB-PCIE": "A100-80G",
        "NVIDIA-A100-SXM4-40GB": "A100-40G",
        "NVIDIA-A100-PCIE-40GB": "A100-40G",
        "NVIDIA-L40S": "L40S",
        "NVIDIA-L4": "L4",
        "NVIDIA-B200": "B200",
        "AMD-INSTINCT-MI300X": "MI300X",
    }
)


def choose_prior(engine_info: EngineInfo) -> tuple[StepModel, StepModel] | Unavailable:
    """The prior of an engine and the floor of calibration; `Unavailable` says what is missing.

    Roofline prior and physical floor where accelerator and model are known, else those of the self-benchmark.
    engine_info may hold anything; invalid parts count as missing.
    """
    roofline_models = _roofline_prior(engine_info)
    if not isinstance(roofline_models, Unavailable):
        return roofline_models
    if not isinstance(engine_info.self_benchmark, SelfBenchmark):
        return Unavailable(f"{roofline_models.reason}, and the engine reports no self-benchmark")
    try:
        benchmark_prior = fit_step_model(engine_info.self_benchmark, engine_info.token_budget)
    except ValueError as error:
        return Unavailable(f"{roofline_models.reason}, and {error}")
    share = OBSERVED_FLOOR_SHARE if engine_info.self_benchmark.is_observed else FLOOR_SHARE
    return benchmark_prior, floor_model(benchmark_prior, share)


def find_accelerator(name: object) -> roofline.Accelerator | None:
    """The data sheet of an accelerator by its name here or its driver's name; None for one that is not in the table."""
    if not isinstance(name, str):
        return None
    driver = name.strip().upper().replace(" ", "-")
    return roofline.ACCELERATORS.get(_DRIVER_NAMES.get(driver, name))


def _roofline_prior(engine_info: EngineInfo) -> tuple[StepModel, StepModel] | Unavailable:
    gpu = find_accelerator(engine_info.accelerator)
    if gpu is None:
        return Unavailable(f"the accelerator {str(engine_info.accelerator)[:80]!r} is in no table")
    if not isinstance(engine_info.config, Mapping):
        return Unavailable("the model's config.json was not found")
    gpus = _valid_count(engine_info.gpus) or 1
    try:
        shape = roofline.model_shape(engine_info.config)
        prior_model = roofline.prior(shape, gpu, gpus)
        return prior_model, _cap_floor(prior_model, roofline.physical_floor(shape, gpu, gpus))
    except (ValueError, TypeError, ArithmeticError) as error:  # the configuration file is external input
        return Unavailable(f"the model's config.json tells no shape: {str(error)[:200]}")


def _cap_floor(prior: StepModel, floor_model_: StepModel) -> StepModel:
    """The floor, nowhere above the prior, because the formulas of both are rough for very narrow models."""
    base, prefill_base, *others = (float(c) for c in np.minimum(coefficients(prior), coefficients(floor_model_)))
    return StepModel(base, prefill_base - base, *others)


def fit_step_model(benchmark: SelfBenchmark, token_budget: int | None = None) -> StepModel:
    """The step model that a self-benchmark shows. token_budget: tokens a step computes; None: each prompt fits one
    step.

    Invalid points (not numbers, not positive, out of range) are dropped. Missing coefficients are filled: sequence by
    prefill_token, because a sequence sends one token through the same weights (0.7 of it on two models on an H200);
    prefill_token by the whole time of the longest prompt over its tokens; base by the fastest step. Raises ValueError
    without a prompt, and with nothing but prompts of one length.
    """
    prompts, batches = _valid_points(benchmark.prefill, 2), _valid_points(benchmark.decode, 3)
    if not prompts:
        raise ValueError("a self-benchmark needs a prompt of one length at least")
    length_count = len({tokens for tokens, *_ in prompts})
    if length_count == 1 and not batches:
        raise ValueError("a self-benchmark of one prompt length needs a second one, or a batch")
    tokens, _, times = np.array(prompts, dtype=np.float64).T
    steps = np.ceil(tokens / (_valid_count(token_budget) or _MAX_COUNT))
    fit_http = bool(batches) and length_count > 1  # a constant for the time of a prefill of any length
    http_s = HTTP_OVERHEAD_PER_TOKEN_S * tokens + (0.0 if fit_http else HTTP_OVERHEAD_S)
    engine_s = times - np.minimum(http_s, _MAX_HTTP_SHARE * times)
    zeros = np.zeros_like(tokens)
    rows, seconds = _decode_rows(batches)
    rows = np.vstack((np.column_stack((steps, tokens, zeros, zeros, zeros + fit_http)) / times[:, None], rows))
    base, token, sequence, cached, _ = nonnegative_least_squares(
        rows, np.concatenate((engine_s / times, np.ones_like(seconds)))
    )
    longest = int(np.argmax(tokens))
    token = token or float(engine_s[longest] / tokens[longest])
    fastest = float(np.concatenate((engine_s / steps, seconds)).min())
    return StepModel(base if base >= _MIN_BASE_SHARE * fastest else fastest, 0.0, token, 0.0, sequence or token, cached)


def _decode_rows(batches: list[tuple[int, int, float]]) -> tuple[FloatArray, FloatArray]:
    """Rows of base, prefill_token, sequence, cached_token and HTTP over their seconds, shape (n, 5); seconds (n,).

    Where all batches are of one size, a sequence costs what a prompt token does.
    """
    sizes, contexts, seconds = np.array(batches, dtype=np.float64).reshape(-1, 3).T
    zeros = np.zeros_like(sizes)
    same_size = np.unique(sizes).size == 1
    contexts_differ = contexts.max(initial=0.0) >= _CONTEXT_RATIO * contexts.min(initial=np.inf)
    columns = (zeros + 1, sizes * same_size, sizes * (not same_size), sizes * contexts * contexts_differ, zeros)
    return np.column_stack(columns) / seconds[:, None], seconds


def floor_model(prior: StepModel, share: float = FLOOR_SHARE) -> StepModel:
    """Floor of calibration for an engine without a known roofline: a share of its prior.

    For a sequence it is at most that share of a prompt token's cost. For a cached token it is 0. Their microseconds are
    below the noise of a step, and one slow batch overestimates them many times.
    """
    if not 0 < share <= 1:
        raise ValueError(f"a floor is a share above 0 and at most 1 of the prior, not {share}")
    reduced_prior = replace(prior, sequence_s=min(prior.sequence_s, prior.prefill_token_s), cached_token_s=0.0)
    return StepModel(*(share * coefficient for coefficient in astuple(reduced_prior)))


def nonnegative_least_squares(rows: FloatArray, targets: FloatArray) -> tuple[float, ...]:
    """argmin |rows x - targets| over x >= 0, for a few columns; rows of shape (n, k), targets (n,).

    The optimum is the plain least-squares solution on the columns where it is above 0. With 5 columns there are 31
    choices, and all are tried. Columns may have any scale; a column of zeros gets 0.
    """
    scale = np.sqrt((rows**2).sum(axis=0))
    best, least_error = np.zeros(rows.shape[1]), float((targets**2).sum())
    usable = np.flatnonzero(scale > 0)
    for size in range(1, usable.size + 1):
        for chosen in itertools.combinations(usable.tolist(), size):
            scaled_columns = rows[:, chosen] / scale[list(chosen)]
            solution, *_ = np.linalg.lstsq(scaled_columns, targets, rcond=None)
            squared_error = float(((scaled_columns @ solution - targets) ** 2).sum())
            if (solution > 0).all() and squared_error < least_error * (1 - 1e-9):
                least_error, best = squared_error, np.zeros(rows.shape[1])
                best[list(chosen)] = solution / scale[list(chosen)]
    return tuple(best.tolist())


def _valid_points(points: object, width: int) -> list[tuple[int, int, float]]:
    """First number, last but one (both counts) and seconds of the valid points with `width` numbers."""
    if not isinstance(points, list | tuple):
        return []
    rows = [point for point in points[:_MAX_POINTS] if isinstance(point, list | tuple) and len(point) == width]
    parsed = [(_valid_count(row[0]), _valid_count(row[-2]), _valid_seconds(row[-1])) for row in rows]
    return [(a, b, c) for a, b, c in parsed if a is not None and b is not None and c is not None]


def _valid_count(value: object) -> int | None:
    """A whole number of at least 1 in the valid range; else None."""
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    return value if 1 <= value <= _MAX_COUNT else None


def _valid_seconds(value: object) -> float | None:
    """A time in the valid range of a point; else None."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return float(value) if _MIN_POINT_S <= value <= _MAX_POINT_S else None
