"""What to expect of an engine that nobody has measured under load: from its data sheet, or from its own warm-up.

Problem: the first replicas of a model run on whatever accelerator there is, and many are in no table. Without a prior
nothing is sized, and calibration, which learns factors on a prior, has nothing to begin with.

Idea: an engine's warm-up times a few requests on the idle engine, a ladder. A step is linear, so non-negative least
squares on the rungs, whose errors count as shares of their own time (one that was disturbed and is far too slow weighs
little), gives the coefficients that a ladder can tell:

- base and sequence from the seconds of a further token at some batch sizes, free of HTTP, and cached_token where the
  batches differ in their contexts;
- prefill_token from the seconds to the first token at some prompt lengths. What these take whatever the length (HTTP,
  and the extra of a step with prefill) is a constant of its own where the batches tell the base; without batches it is
  `HTTP_S` and the base gets the rest.

What a ladder cannot tell is 0: any_prefill (it looks like HTTP) and prefill_pair (its prompts are short: up to 1,024
tokens attention is 3 % of an 8B's prefill on an H200). So long prompts are underrated, and calibration does not learn
what is 0 in its prior: a roofline is the better source where there is one. Where the rungs do not show a coefficient
that a step must have, it is filled with the most that it can be: a prior that is too slow buys a replica too many until
calibration knows better, one that is too fast breaks the promise.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import astuple, replace
from types import MappingProxyType
from typing import Final

import numpy as np

from plimsoll.core import roofline
from plimsoll.core.calibration.belief import coefficients
from plimsoll.core.forecast import Unknown
from plimsoll.core.knee import HTTP_S, HTTP_TOKEN_S
from plimsoll.core.latency import StepModel
from plimsoll.core.ports import About, Ladder
from plimsoll.core.workload import FloatArray

# Share of a measured coefficient below which nothing is believed. Ladders climbed on a shared node have been twice too
# slow, and one rung of seven that was far too slow makes 3.6 of a token's cost: a higher floor could hide the truth.
FLOOR_SHARE: Final = 0.25

_LONGEST_S: Final = 3600.0  # of a rung; and the shortest
_SHORTEST_S: Final = 1e-7
_MOST: Final = 10_000_000  # tokens or sequences of a rung
_RUNGS: Final = 64  # that are read
_HTTP_SHARE: Final = 0.5  # of a rung's time that HTTP may be
_LEAST_BASE: Final = 0.01  # of the fastest step: a smaller one is what rounding left of none
_LONG: Final = 8.0  # times as long as others: contexts whose reading shows

# By the driver's names, which nvidia-smi reports and node labels hold with hyphens.
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


def choose(about: About) -> tuple[StepModel, StepModel] | Unknown:
    """The prior of an engine and the floor that calibration must not go below; Unknown says what is missing.

    Roofline prior and physical floor where accelerator and model are known, the ladder's else. `about` may hold
    anything: what makes no sense counts as not there.
    """
    known = _roofline(about)
    if not isinstance(known, Unknown):
        return known
    if not isinstance(about.ladder, Ladder):
        return Unknown(f"{known.why}, and the engine measured no ladder")
    try:
        measured = prior(about.ladder, about.token_budget)
    except ValueError as error:
        return Unknown(f"{known.why}, and {error}")
    return measured, floor(measured)


def accelerator(name: object) -> roofline.Accelerator | None:
    """The data sheet of an accelerator by our name or its driver's; None for one that is not in the table."""
    if not isinstance(name, str):
        return None
    driver = name.strip().upper().replace(" ", "-")
    return roofline.ACCELERATORS.get(_DRIVER_NAMES.get(driver, name))


def _roofline(about: About) -> tuple[StepModel, StepModel] | Unknown:
    gpu = accelerator(about.accelerator)
    if gpu is None:
        return Unknown(f"the accelerator {str(about.accelerator)[:80]!r} is in no table")
    if not isinstance(about.config, Mapping):
        return Unknown("the model's config.json was not found")
    gpus = _count(about.gpus) or 1
    try:
        shape = roofline.model_shape(about.config)
        expected = roofline.prior(shape, gpu, gpus)
        return expected, _under(expected, roofline.physical_floor(shape, gpu, gpus))
    except (ValueError, TypeError, ArithmeticError) as error:  # a configuration is a stranger's file
        return Unknown(f"the model's config.json tells no shape: {str(error)[:200]}")


def _under(prior: StepModel, floor: StepModel) -> StepModel:
    """The floor, nowhere above the prior: the formulas of both are rough for very narrow models."""
    base, prefill_base, *others = (float(c) for c in np.minimum(coefficients(prior), coefficients(floor)))
    return StepModel(base, prefill_base - base, *others)


def prior(ladder: Ladder, token_budget: int | None = None) -> StepModel:
    """The step model that a ladder shows. token_budget: tokens a step computes; None: each prompt fits one step.

    Rungs that are no measurements (not numbers, not positive, absurd) are left out. Filled where not shown:
    sequence by prefill_token, as a sequence sends one token through the same weights (0.7 of it on two models on an
    H200); prefill_token by all that the longest prompt takes, over its tokens; base by the fastest step seen.
    Raises ValueError for a ladder without a prompt, and for one with nothing but prompts of one length.
    """
    prompts, batches = _rungs(ladder.prefill, 2), _rungs(ladder.decode, 3)
    if not prompts:
        raise ValueError("a ladder needs a prompt of one length at least")
    lengths = len({tokens for tokens, *_ in prompts})
    if lengths == 1 and not batches:
        raise ValueError("one prompt length tells no base from its tokens: a ladder needs a second one, or a batch")
    tokens, _, times = np.array(prompts, dtype=np.float64).T
    steps = np.ceil(tokens / (_count(token_budget) or _MOST))
    free = bool(batches) and lengths > 1  # a constant of their own for what prefills take at any length
    outside = HTTP_TOKEN_S * tokens + (0.0 if free else HTTP_S)
    inside = times - np.minimum(outside, _HTTP_SHARE * times)
    none = np.zeros_like(tokens)
    rows, seconds = _decode_rows(batches)
    rows = np.vstack((np.column_stack((steps, tokens, none, none, none + free)) / times[:, None], rows))
    base, token, sequence, cached, _ = nonnegative(rows, np.concatenate((inside / times, np.ones_like(seconds))))
    longest = int(np.argmax(tokens))
    token = token or float(inside[longest] / tokens[longest])
    fastest = float(np.concatenate((inside / steps, seconds)).min())
    return StepModel(base if base >= _LEAST_BASE * fastest else fastest, 0.0, token, 0.0, sequence or token, cached)


def _decode_rows(batches: list[tuple[int, int, float]]) -> tuple[FloatArray, FloatArray]:
    """Rows of base, prefill_token, sequence, cached_token and HTTP over their seconds, shape (n, 5); seconds (n,).

    Where all batches are of one size, a sequence costs what a prompt token does.
    """
    sizes, contexts, seconds = np.array(batches, dtype=np.float64).reshape(-1, 3).T
    none = np.zeros_like(sizes)
    alike = np.unique(sizes).size == 1
    differ = contexts.max(initial=0.0) >= _LONG * contexts.min(initial=np.inf)
    columns = (none + 1, sizes * alike, sizes * (not alike), sizes * contexts * differ, none)
    return np.column_stack(columns) / seconds[:, None], seconds


def floor(prior: StepModel, share: float = FLOOR_SHARE) -> StepModel:
    """The model below which nothing is believed of an engine whose roofline is not known: a share of its prior.

    Of a sequence it is the share of what a prompt token costs where that is less, of a cached token it is 0: their
    microseconds drown in the noise of a step, and one slow batch makes many times as much of them.
    """
    if not 0 < share <= 1:
        raise ValueError(f"a floor is a share above 0 and at most 1 of the prior, not {share}")
    least = replace(prior, sequence_s=min(prior.sequence_s, prior.prefill_token_s), cached_token_s=0.0)
    return StepModel(*(share * coefficient for coefficient in astuple(least)))


def nonnegative(rows: FloatArray, wanted: FloatArray) -> tuple[float, ...]:
    """argmin |rows x - wanted| over x >= 0, for a handful of columns; rows of shape (n, k), wanted (n,).

    The optimum is the plain least-squares solution on the columns where it is above 0: with 5 columns there are 31
    choices of them, and all are tried. Columns may be of any scale; one of zeros gets 0.
    """
    scale = np.sqrt((rows**2).sum(axis=0))
    best, least = np.zeros(rows.shape[1]), float((wanted**2).sum())
    usable = np.flatnonzero(scale > 0)
    for size in range(1, usable.size + 1):
        for chosen in itertools.combinations(usable.tolist(), size):
            part = rows[:, chosen] / scale[list(chosen)]
            found, *_ = np.linalg.lstsq(part, wanted, rcond=None)
            missed = float(((part @ found - wanted) ** 2).sum())
            if (found > 0).all() and missed < least * (1 - 1e-9):
                least, best = missed, np.zeros(rows.shape[1])
                best[list(chosen)] = found / scale[list(chosen)]
    return tuple(best.tolist())


def _rungs(rungs: object, width: int) -> list[tuple[int, int, float]]:
    """First number, last but one (both counts) and seconds of the rungs that have `width` of them and make sense."""
    if not isinstance(rungs, list | tuple):
        return []
    rows = [rung for rung in rungs[:_RUNGS] if isinstance(rung, list | tuple) and len(rung) == width]
    read = [(_count(row[0]), _count(row[-2]), _seconds(row[-1])) for row in rows]
    return [(a, b, c) for a, b, c in read if a is not None and b is not None and c is not None]


def _count(value: object) -> int | None:
    """A whole number of at least 1 that an engine can have; None for all else."""
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    return value if 1 <= value <= _MOST else None


def _seconds(value: object) -> float | None:
    """A time that a rung can take; None for all else."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return float(value) if _SHORTEST_S <= value <= _LONGEST_S else None
