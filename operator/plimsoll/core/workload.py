"""Request lengths: the joint distribution of prompt, cached and output tokens.

Problem: sizing by mean lengths misses what violates an SLO. A prompt's attention grows with its square, a batch's cache
with prompts and outputs together, the tail of waiting with their spread. The data differ too: samples at the gateway,
bucket counts from an engine, several pods and windows of either, requests that have not ended.

Idea: one bounded table of weighted rows (uncached, cached, output). Every per-request quantity is a function of the
rows, so its mean, quantiles and dispersion are weighted sums. Histograms become stratified rows by their inverse
distribution. Tables merge by weight and shrink by joining neighbouring rows, which preserves every mean. Unfinished
requests count as censored, because under rising load the finished ones are the short ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist
from typing import Final

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

MAX_ROWS: Final = 512  # keeps a p99 of ten rows' weight, and a sum over rows at a few microseconds
HISTOGRAM_ROWS: Final = 256

_NORMAL: Final = NormalDist()

# Multiples of these, modulo 1, fill the square and the cube evenly: powers of the inverse of the root of
# x^(k+1) = x + 1 for k = 2 (Roberts, "The unreasonable effectiveness of quasirandom sequences", 2018).
_QUASIRANDOM_STEPS: Final = (0.7548776662466927, 0.5698402909980532)


@dataclass(frozen=True, eq=False)
class Workload:
    """Weighted requests: four float arrays of one length of at least 1; the weights are above 0 and sum to 1.

    uncached_tokens: prompt tokens that prefill computes. cached_tokens: prompt tokens that a prefix hit saves.
    output_tokens: generated tokens, the first included. Build it with the functions below, which check and scale.
    Raises ValueError that names the argument.
    """

    uncached_tokens: FloatArray
    cached_tokens: FloatArray
    output_tokens: FloatArray
    weights: FloatArray

    def __post_init__(self) -> None:
        rows = _validate_rows("weights", self.weights, None)
        for name in ("uncached_tokens", "cached_tokens", "output_tokens"):
            _validate_rows(name, getattr(self, name), rows.size)
        if not math.isclose(float(rows.sum()), 1.0, abs_tol=1e-9) or not np.all(rows > 0):
            raise ValueError("weights must be above 0 and sum to 1")

    @property
    def prompt_tokens(self) -> FloatArray:
        """Uncached and cached prompt tokens of each row."""
        return self.uncached_tokens + self.cached_tokens

    def mean(self, values: FloatArray) -> float:
        """Weighted mean of a per-request quantity. values: one number a row."""
        return float(self.weights @ _validate_rows("values", values, self.weights.size))

    def moment(self, values: FloatArray, order: int) -> float:
        """Weighted mean of values ** order. values: one number a row."""
        return self.mean(_validate_rows("values", values, self.weights.size) ** order)

    def scv(self, values: FloatArray) -> float | None:
        """Squared coefficient of variation, variance over squared mean; None where the mean is 0.

        values: one non-negative number a row.
        """
        mean = self.mean(values)
        if mean <= 0:
            return None
        # Centred: the difference of two large moments would lose a small variance to rounding.
        return self.mean((values / mean - 1.0) ** 2)

    def overlap(self, values: FloatArray) -> float:
        """E[min(X, X')] / E[X] of two requests' values: 1 if all are alike, 1/2 if exponential, 1 where the mean is 0.

        values: one non-negative number a row.
        """
        mean = self.mean(values)
        if mean <= 0:
            return 1.0
        order = np.argsort(values, kind="stable")
        survival = np.cumsum(self.weights[order][::-1])[::-1]  # share of the values that are no less
        return float(np.diff(values[order], prepend=0.0) @ survival**2) / mean

    def quantile(self, values: FloatArray, share: float | FloatArray) -> FloatArray:
        """The smallest value that at least `share` of the requests do not exceed.

        values: one number a row. share: 0 to 1, a number or an array. Returns an array of share's shape.
        """
        shares = np.asarray(share, dtype=np.float64)
        if not np.all((shares >= 0) & (shares <= 1)):
            raise ValueError("share must lie between 0 and 1")
        values = _validate_rows("values", values, self.weights.size)
        order = np.argsort(values, kind="stable")
        cumulative = np.cumsum(self.weights[order])
        # Rounding in the sum must not push a share that is met exactly to the next row, nor 1.0 past the last.
        index = np.searchsorted(cumulative, shares - 1e-12, side="left")
        return np.asarray(values[order][np.minimum(index, values.size - 1)], dtype=np.float64)


@dataclass(frozen=True, eq=False)
class LengthHistogram:
    """Counts of lengths in buckets, as differences of Prometheus' `le` buckets.

    edges: ascending upper edges in tokens, the last may be infinite. counts: requests in each bucket (not cumulated;
    may be fractional). mean_tokens: the histogram's sum over its count, None if unknown. maximum_tokens: no length
    exceeds it (the model's context); required if the infinite bucket has counts. Raises ValueError that names the
    argument.
    """

    edges: FloatArray
    counts: FloatArray
    mean_tokens: float | None = None
    maximum_tokens: float | None = None

    def __post_init__(self) -> None:
        counts = _validate_rows("counts", self.counts, None)
        edges = np.asarray(self.edges, dtype=np.float64)
        if edges.shape != counts.shape:
            raise ValueError(f"edges must have one entry a bucket, {counts.size}, not shape {edges.shape}")
        if not np.all(np.isfinite(edges[:-1])) or np.isnan(edges[-1]) or not np.all(np.diff(edges, prepend=0.0) > 0):
            raise ValueError("edges must ascend from above 0; only the last may be infinite")
        if counts.sum() <= 0:
            raise ValueError("counts are all zero: nothing is known of the lengths")
        for name in ("mean_tokens", "maximum_tokens"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be finite and above 0, not {value}")
        if math.isinf(edges[-1]) and counts[-1] > 0 and self.maximum_tokens is None:
            raise ValueError("maximum_tokens is needed: there are counts above the last finite edge")

    def lengths(self, shares: FloatArray) -> FloatArray:
        """Return the inverse distribution: the length below which each share (0 to 1, ends excluded) of the requests
        lies, tokens.

        Between two edges the normal quantile of the share is linear in the logarithm of the length. This is exact for
        lognormal lengths, which coarse buckets otherwise widen (by 40 % in variance at 1-2-5 edges), and monotone for
        any. The open ends continue the adjacent slope. If the mean is known, the position v inside each bucket becomes
        v^k such that the mean is met (k within 1/16 to 16; a mean that the buckets do not allow is met as nearly as
        possible).
        """
        values = np.asarray(shares, dtype=np.float64)
        if not np.all((values > 0) & (values < 1)):
            raise ValueError("shares must lie between 0 and 1, the ends excluded")
        lows, spans, within = self._locate(values)
        return np.asarray(lows + spans * within**self._mean_correction)

    @cached_property
    def _mean_correction(self) -> float:
        """Return the exponent k, by bisection of its logarithm: lengths fall as it grows."""
        if self.mean_tokens is None:
            return 1.0
        lows, spans, within = self._locate((np.arange(HISTOGRAM_ROWS) + 0.5) / HISTOGRAM_ROWS)
        low, high = -math.log(16), math.log(16)
        for _ in range(30):
            middle = (low + high) / 2
            if float(np.mean(lows + spans * within ** math.exp(middle))) > self.mean_tokens:
                low = middle
            else:
                high = middle
        return math.exp((low + high) / 2)

    def _locate(self, shares: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        """The lower edge and the width of each share's bucket, and its place inside, 0 to 1."""
        ceiling = math.inf if self.maximum_tokens is None else self.maximum_tokens
        nonempty = np.flatnonzero(np.asarray(self.counts) > 0)
        highs = np.minimum(np.asarray(self.edges, dtype=np.float64), ceiling)
        lows, highs = np.concatenate(([0.0], highs[:-1]))[nonempty], highs[nonempty]
        weights = np.asarray(self.counts, dtype=np.float64)[nonempty]
        cumulative = np.concatenate(([0.0], np.cumsum(weights) / weights.sum()))
        bucket = np.minimum(np.searchsorted(cumulative[1:], shares, side="left"), nonempty.size - 1)
        # Buckets above the maximum have no width; 1 instead avoids 0 / 0.
        spans = np.maximum(highs - lows, 0.0)
        safe = np.where(spans > 0, spans, 1.0)[bucket]
        if nonempty.size < 3:  # no bucket has a neighbour on either side: no slope to be had
            within = (shares - cumulative[bucket]) / (cumulative[bucket + 1] - cumulative[bucket])
        else:
            within = (_lognormal_pieces(shares, bucket, lows, highs, cumulative) - lows[bucket]) / safe
        return lows[bucket], spans[bucket], np.clip(within, 0.0, 1.0)


def _lognormal_pieces(
    shares: FloatArray, bucket: npt.NDArray[np.intp], lows: FloatArray, highs: FloatArray, cumulative: FloatArray
) -> FloatArray:
    """Lengths at the shares, log-length linear in the normal quantile inside each bucket; at least three buckets."""
    edges = np.array([_probit(share) for share in cumulative[1:-1]])
    slopes = np.empty(lows.size)
    slopes[1:-1] = np.log(np.maximum(highs[1:-1], lows[1:-1]) / lows[1:-1]) / np.maximum(np.diff(edges), 1e-12)
    slopes[0], slopes[-1] = slopes[1], slopes[-2]
    # At the open ends the slope continues up to the bucket's far edge, and its shares fill the remaining width.
    ends = np.array([0.0, 1.0])
    if lows[0] > 0 and slopes[0] > 0:
        ends[0] = _NORMAL.cdf(edges[0] - math.log(highs[0] / lows[0]) / slopes[0])
    if slopes[-1] > 0:
        ends[1] = _NORMAL.cdf(edges[-1] + math.log(max(highs[-1] / lows[-1], 1.0)) / slopes[-1])
    adjusted = np.interp(shares, cumulative, np.concatenate((ends[:1], cumulative[1:-1], ends[1:])))
    # The first bucket hangs from its upper edge, all others stand on their lower one.
    anchors, quantiles = np.concatenate((highs[:1], lows[1:])), np.concatenate((edges[:1], edges))
    normal = np.array([_probit(share) for share in adjusted])
    return np.asarray(anchors[bucket] * np.exp(np.clip(slopes[bucket] * (normal - quantiles[bucket]), -50.0, 50.0)))


def _probit(share: float) -> float:
    """Return the normal quantile; shares rounded to 0 or 1 stay finite."""
    return _NORMAL.inv_cdf(min(max(share, 1e-15), 1 - 1e-15))


def from_samples(
    uncached_tokens: npt.ArrayLike,
    cached_tokens: npt.ArrayLike,
    output_tokens: npt.ArrayLike,
    weights: npt.ArrayLike | None = None,
    finished: npt.ArrayLike | None = None,
) -> Workload:
    """Return the workload of observed requests, joined to at most MAX_ROWS rows.

    Three arrays of one length, of finite numbers of 0 or more; weights: any positive scale, equal if None. finished:
    False if output_tokens is what an unfinished request has so far; such a row counts as censored (see
    `censored_weights`). Raises ValueError that names the argument; no samples are an error, not a zero.
    """
    uncached = _validate_rows("uncached_tokens", uncached_tokens, None)
    cached = _validate_rows("cached_tokens", cached_tokens, uncached.size)
    output = _validate_rows("output_tokens", output_tokens, uncached.size)
    mass = np.ones(uncached.size) if weights is None else _validate_rows("weights", weights, uncached.size)
    if mass.sum() <= 0:
        raise ValueError("weights are all zero: nothing is known of the requests")
    if finished is not None:
        mass = censored_weights(output, finished, mass)
    return _compress(np.stack((uncached, cached, output)), mass)


def from_histograms(
    uncached: LengthHistogram,
    output: LengthHistogram,
    cached: LengthHistogram | None = None,
    rows: int = HISTOGRAM_ROWS,
) -> Workload:
    """Return a workload with these marginal distributions, taken as independent, because histograms do not show the
    joint.

    Deterministic: each marginal is cut into `rows` strata of equal weight, with one row in the middle of each. The
    strata are paired by a low-discrepancy sequence, so that the joint fills its square or cube evenly. Without a cached
    histogram no prefix is cached. Raises ValueError.
    """
    if not 1 <= rows <= MAX_ROWS:
        raise ValueError(f"rows must lie between 1 and {MAX_ROWS}, not {rows}")
    index = np.arange(rows)
    # Ranks instead of the sequence itself: each stratum of each marginal is used exactly once.
    strata = [index, *(np.argsort(np.argsort((index + 0.5) * step % 1.0)) for step in _QUASIRANDOM_STEPS)]
    shares = [(order + 0.5) / rows for order in strata]
    cached_lengths = np.zeros(rows) if cached is None else cached.lengths(shares[2])
    # A request makes at least one token, and prefill computes at least one, whatever the first bucket starts at.
    table = np.stack(
        (np.maximum(uncached.lengths(shares[0]), 1.0), cached_lengths, np.maximum(output.lengths(shares[1]), 1.0))
    )
    return _compress(table, np.full(rows, 1.0 / rows))


def merge(parts: Iterable[tuple[Workload, float]]) -> Workload | None:
    """One workload of several (pods, windows), each with its weight, such as its number of requests.

    Weights of 0 drop a part; None where nothing is left. The order of the parts does not matter (beyond rounding), and
    means are kept exactly; merging in stages gives the same up to how rows were joined. Raises ValueError.
    """
    weighted = []
    for workload, weight in parts:
        if not (math.isfinite(weight) and weight >= 0):
            raise ValueError(f"the weight of a part must be finite and 0 or more, not {weight}")
        if weight > 0:
            weighted.append((workload, weight))
    if not weighted:
        return None
    columns = [np.stack((w.uncached_tokens, w.cached_tokens, w.output_tokens)) for w, _ in weighted]
    return _compress(np.concatenate(columns, axis=1), np.concatenate([w.weights * weight for w, weight in weighted]))


def censored_weights(output_tokens: npt.ArrayLike, finished: npt.ArrayLike, weights: npt.ArrayLike) -> FloatArray:
    """Return weights with which finished requests also represent unfinished ones (Kaplan-Meier estimator).

    An unfinished row shows only that its output is longer than what it has. Its weight moves in equal shares to all
    longer rows (Efron's redistribution to the right, 1967, which equals Kaplan-Meier; with further columns it is
    Stute's estimator, 1993). Rows longer than every finished one keep their weight, a lower bound of the tail. Arrays
    of one length; returns non-negative weights of the same sum, in the same order. Raises ValueError.
    """
    output = _validate_rows("output_tokens", output_tokens, None)
    mass = _validate_rows("weights", weights, output.size)
    is_finished = np.asarray(finished)
    if is_finished.dtype != np.bool_ or is_finished.shape != output.shape:
        raise ValueError("finished must be one boolean a row")
    if mass.sum() <= 0:
        raise ValueError("weights are all zero: nothing is known of the requests")
    # At one length finished rows come first: the unfinished one outlives them.
    order = np.lexsort((~is_finished, output))
    ordered, is_finished_sorted = mass[order], is_finished[order]
    at_risk = np.cumsum(ordered[::-1])[::-1]
    after = np.concatenate((at_risk[1:], [0.0]))
    # The factor by which each unfinished row's weight enlarges all that follow it.
    growth_factors = np.where(
        is_finished_sorted | (after <= 0) | (ordered <= 0), 1.0, at_risk / np.where(after > 0, after, 1.0)
    )
    scale = np.concatenate(([1.0], np.cumprod(growth_factors)[:-1]))
    shares = np.where(is_finished_sorted, ordered * scale, 0.0)
    last = np.flatnonzero(is_finished_sorted & (ordered > 0))
    tail = int(last[-1]) + 1 if last.size else 0
    if tail < ordered.size:  # nothing finished is longer: each keeps the weight that has reached the first of them
        shares[tail:] = ordered[tail:] * scale[tail]
    result = np.empty_like(shares)
    result[order] = shares
    return result


def _validate_rows(name: str, values: npt.ArrayLike, size: int | None) -> FloatArray:
    """The values as a one-dimensional float array of `size` (any but 0 if None), finite and 0 or more."""
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or array.size == 0 or (size is not None and array.size != size):
        raise ValueError(f"{name} must be one number a row ({size or 'at least 1'} rows), not shape {array.shape}")
    if not np.all(np.isfinite(array)) or np.any(array < 0):
        raise ValueError(f"{name} must be finite and 0 or more")
    return array


def _compress(table: FloatArray, weights: FloatArray) -> Workload:
    """Rows (3, n) with weights of any scale, in canonical order, as a workload of at most MAX_ROWS rows."""
    table, weights = table[:, weights > 0], weights[weights > 0]
    order = np.lexsort((weights, *table[::-1]))
    table, weights = table[:, order], weights[order]
    weights = weights / weights.sum()  # summed in canonical order: the same rows give the same bits
    is_new_row = np.concatenate(([True], np.any(np.diff(table, axis=1) != 0, axis=0)))
    cells = np.cumsum(is_new_row) - 1
    if cells[-1] + 1 > MAX_ROWS:
        cells = _partition(table, weights)
    mass = np.bincount(cells, weights)
    # Relative to each cell's first row, so that equal values stay what they are: whole tokens must stay whole.
    first = table[:, np.unique(cells, return_index=True)[1]]
    means = [
        first_value + np.bincount(cells, weights * (column - first_value[cells])) / mass
        for first_value, column in zip(first, table, strict=True)
    ]
    return Workload(means[0], means[1], means[2], mass / mass.sum())


def _partition(table: FloatArray, weights: FloatArray) -> npt.NDArray[np.intp]:
    """Splits the rows (3, n) into at most MAX_ROWS cells of near ones: the number of each row's cell.

    Starts with one cell. In each round those with more than a fair share of the scatter that is left are cut at their
    mean, across the column in which they scatter most. Far tails scatter most, so they keep rows of their own.
    """
    means = table @ weights
    scaled = table / np.where(means > 0, means, 1.0)[:, None]
    cells = np.zeros(weights.size, dtype=np.intp)
    count = 1
    while count < MAX_ROWS:
        mass = np.bincount(cells, weights, count)
        centers = np.stack([np.bincount(cells, weights * column, count) / mass for column in scaled])
        deviations = scaled - centers[:, cells]
        scatter = np.stack([np.bincount(cells, weights * column, count) for column in deviations**2])
        total = scatter.sum(axis=0)
        candidates = np.flatnonzero((total > total.sum() / MAX_ROWS) & (total > 1e-18 * mass))
        if candidates.size == 0:
            break
        chosen = candidates[np.argsort(-total[candidates], kind="stable")][: MAX_ROWS - count]
        new_cells = np.full(count, -1, dtype=np.intp)
        new_cells[chosen] = count + np.arange(chosen.size)
        above = deviations[np.argmax(scatter, axis=0)[cells], np.arange(cells.size)] > 0
        cells = np.where(above & (new_cells[cells] >= 0), new_cells[cells], cells)
        count += chosen.size
    return cells
