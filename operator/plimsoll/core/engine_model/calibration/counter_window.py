"""Work of one replica in one window, as sums of its counters.

Problem: a stock engine exports how many steps it ran and how many tokens it computed, but neither the contexts that
those tokens attended to, nor how many steps had any prefill. The cost of a step depends on all of them.

Idea: one record for all engines. Sums that every engine exports are required, others are optional, and a missing one is
not zero: `fill_missing` derives it from the request lengths, which the gateway knows. What is still missing is assumed
from `TYPICAL_LENGTHS` and marked (`StepSums.assumed`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np

from plimsoll.core.workload import Workload

MIN_STEPS: Final = 20  # windows with fewer steps are mostly noise, because time shifts between neighbouring steps
MIN_COVERAGE: Final = 0.9
_RUNNING_PER_OUTPUT: Final = 1.25  # more output tokens than this per running sequence is speculation, not noise
_TOKENS_IN_FLIGHT: Final = 16384  # two steps of a large token budget: counted as computed, not yet as prompt
_TOKENS_TOLERANCE: Final = 0.1
_MAX_VALUE: Final = 1e15  # above any sum of a window


@dataclass(frozen=True, slots=True)
class WindowSums:
    """Sums over one window of one replica, in which at least one request was always running.

    Omit the windows of an engine with idle times, because it does not report busy seconds. The optional fields are None
    if the engine does not export them.
    """

    end_s: float  # time of the window's end, on the caller's clock
    busy_s: float  # seconds in which steps ran
    steps: float  # vllm:iteration_tokens_total_count
    computed_tokens: float  # vllm:iteration_tokens_total_sum: prompt tokens computed plus output tokens
    output_tokens: float  # vllm:generation_tokens_total
    prompt_tokens: float  # vllm:prompt_tokens_by_source_total{source="local_compute"}
    mean_running: float  # vllm:num_requests_running, mean over the window
    coverage: float = 1.0  # share of the window that the counters cover
    prefill_steps: float | None = None  # steps with any prefill
    prefill_pairs: float | None = None  # sum over prefilled chunks of n (context + n / 2)
    cached_tokens_read: float | None = None  # sum over steps of the context of all decoding sequences
    replica: str = ""  # name of the replica
    weight: float = 1.0  # next to a window whose steps the engine counts; less if they are derived from latencies

    @property
    def is_exact(self) -> bool:
        """Whether nothing has to be assumed."""
        return None not in (self.prefill_steps, self.prefill_pairs, self.cached_tokens_read)


@dataclass(frozen=True, slots=True)
class ContextLengths:
    """Token-weighted mean lengths of the requests of a mix.

    With U uncached and H cached prompt tokens and O output tokens of a request, and E the mean over requests:
    chunk_tokens = E[U] / E[number of chunks], a chunk being at most the engine's token budget; prefill_context_tokens =
    E[U (H + U / 2)] / E[U]; decode_context_tokens = E[O (H + U + O / 2)] / E[O].
    """

    chunk_tokens: float
    prefill_context_tokens: float
    decode_context_tokens: float


# Chat mix with prompts of 1,000 and outputs of 200 tokens, with a typical spread.
TYPICAL_LENGTHS: Final = ContextLengths(chunk_tokens=1000.0, prefill_context_tokens=800.0, decode_context_tokens=1200.0)


class StepSums(NamedTuple):
    """The six sums that a step model multiplies, and whether some of them are assumed.

    assumed: one of the two context sums comes from `TYPICAL_LENGTHS`, so its time may be far off.
    """

    steps: float
    prefill_steps: float
    prompt_tokens: float
    prefill_pairs: float
    sequences: float
    cached_tokens_read: float
    assumed: bool


def context_lengths(workload: Workload, token_budget: float) -> ContextLengths:
    """Return the lengths of a workload on an engine that computes at most `token_budget` tokens in a step.

    Raises ValueError for a budget that is not positive, and for a workload that computes no prompt token or no output.
    """
    uncached, cached, output = workload.uncached_tokens, workload.cached_tokens, workload.output_tokens
    prompt_mean, output_mean = workload.mean(uncached), workload.mean(output)
    if not (token_budget > 0 and prompt_mean > 0 and output_mean > 0):
        raise ValueError("lengths need a token budget, prompts and outputs above 0")
    return ContextLengths(
        chunk_tokens=prompt_mean / workload.mean(np.ceil(uncached / token_budget)),
        prefill_context_tokens=workload.mean(uncached * (cached + uncached / 2)) / prompt_mean,
        decode_context_tokens=workload.mean(output * (cached + uncached + output / 2)) / output_mean,
    )


def fill_missing(window: WindowSums, lengths: ContextLengths) -> WindowSums:
    """Return the window with missing sums derived from the lengths of its requests.

    Chunks that begin at random fall into steps * (1 - exp(-chunks / steps)) different steps (Poisson occupancy). Raises
    ValueError for lengths that are not positive and finite.
    """
    numbers = (lengths.chunk_tokens, lengths.prefill_context_tokens, lengths.decode_context_tokens)
    if not all(0 < number < math.inf for number in numbers):
        raise ValueError(f"mean lengths are positive numbers of tokens, not {numbers}")
    steps, pairs, cached_read = _context_sums(window, lengths)
    return replace(window, prefill_steps=steps, prefill_pairs=pairs, cached_tokens_read=cached_read)


def step_sums(window: WindowSums) -> StepSums:
    """Return the sums of a window without `validity_error`."""
    prefill_steps, pairs, cached_read = _context_sums(window, TYPICAL_LENGTHS)
    assumed = window.prefill_pairs is None or window.cached_tokens_read is None
    return StepSums(
        window.steps, prefill_steps, prompt_tokens(window), pairs, sequence_steps(window), cached_read, assumed=assumed
    )


def _context_sums(window: WindowSums, lengths: ContextLengths) -> tuple[float, float, float]:
    """Return steps with prefill, prefill pairs and cached tokens read: counted, or derived from lengths."""
    prompt = prompt_tokens(window)
    steps, pairs, cached_read = window.prefill_steps, window.prefill_pairs, window.cached_tokens_read
    if steps is None:
        chunks = prompt / lengths.chunk_tokens
        steps = window.steps * -math.expm1(-chunks / window.steps) if window.steps > 0 else 0.0
    if pairs is None:
        pairs = prompt * lengths.prefill_context_tokens
    if cached_read is None:
        cached_read = sequence_steps(window) * lengths.decode_context_tokens
    return steps, pairs, cached_read


def prompt_tokens(window: WindowSums) -> float:
    """Return the computed prompt tokens: computed less output tokens, because the prompt counter lags."""
    return max(0.0, window.computed_tokens - window.output_tokens)


def sequence_steps(window: WindowSums) -> float:
    """Return the decoding sequences, summed over steps: output tokens, unless speculation gives
    several per sequence.
    """
    running = window.mean_running * window.steps
    return running if window.output_tokens > _RUNNING_PER_OUTPUT * running else window.output_tokens


def validity_error(window: WindowSums) -> str | None:
    """Return why a window cannot be used for calibration; None if it can."""
    required = (
        window.end_s,
        window.busy_s,
        window.steps,
        window.computed_tokens,
        window.output_tokens,
        window.prompt_tokens,
        window.mean_running,
        window.coverage,
    )
    optional = (window.prefill_steps, window.prefill_pairs, window.cached_tokens_read)
    numbers = (*required, *(value for value in optional if value is not None))
    if not all(abs(number) < _MAX_VALUE for number in numbers):  # NaN is not
        return "a value is not a number that a window can hold"
    if not 0.0 < window.weight <= 1.0:
        return "its weight is not above 0 and at most 1"
    if min(numbers[1:]) < 0:  # the first is a time, whose zero is the caller's
        return "a counter was reset"
    return _coverage_error(window) or _consistency_error(window)


def _coverage_error(window: WindowSums) -> str | None:
    if not MIN_COVERAGE <= window.coverage <= 1:
        return f"the counters saw {window.coverage:.0%} of the window"
    if window.steps < MIN_STEPS or window.busy_s <= 0:
        return f"{window.steps:.0f} steps are too few"
    if window.mean_running < 1:
        return "the engine was idle part of the time"
    return None


def _consistency_error(window: WindowSums) -> str | None:
    counted = window.prompt_tokens + window.output_tokens
    if abs(window.computed_tokens - counted) > _TOKENS_IN_FLIGHT + _TOKENS_TOLERANCE * counted:
        return "the token counters are not of the same moments"
    if window.prefill_steps is not None and window.prefill_steps > window.steps:
        return "more steps with prefill than steps"
    return None
