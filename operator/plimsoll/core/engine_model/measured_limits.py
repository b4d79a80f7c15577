"""Limits of an engine that its readings contradict: sequences that it runs at once, and tokens in its KV cache.

Problem: an engine may hold less than it announced, because of an argument, a proxy or another process, or because
several groups of its layers share the blocks. Requests then wait inside the engine, where no model expects them: sizing
and admission count on places that are not there.

Idea: what an engine runs while many requests wait for it is all that it can run. If the KV cache has room, and the
running sequences are mostly as many as there ever were, that number is the limit. A reading with more ends it.

How many tokens the KV cache holds shows in how its used share moves with the tokens that the engine's counters add and
take away, whether it is full or nearly empty and whatever the request lengths are. Both have errors: tokens of aborted
requests, which the counters never take away, shared prefixes, prompts in progress. If these are independent of the
load, the capacity lies between the slopes of the two regressions, of each quantity on the other (Frisch 1934). The
larger slope counts, so errors can hide a small cache but not show one. The limit ends when that slope is not small.

The most that ever ran, and a limit by it, also end without evidence for two hours: gateways send no more than a limit
allows, so it would never be contradicted, and one reading in error would hide all limits below it. An engine that is
busy with long prompts can look like one with few places, so the limit is at least an eighth of what was announced.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Annotated, Final, NamedTuple

from plimsoll.core.codec import Number
from plimsoll.core.engine_model.step_time import EngineLimits

_MIN_READINGS: Final = 8.0  # of deviations; of the most running sequences while others wait
_MIN_SHARE: Final = 0.5  # of the readings in which others wait
_MIN_WAITING: Final = 0.25  # of the running sequences; fewer may wait for the next step
_MIN_SLOTS: Final = 8.0  # fewer may run because a long prompt takes the token budget of a step
_MOST_RUNNING: Final = 1e9  # of a page that is in error
_TOLERANCE: Final = 0.02  # of the running sequences: those that end within a step
_ROOM: Final = 0.9  # share of the KV cache above which sequences may wait for it
_MEMORY: Final = 300.0  # readings
_MOST_DEVIATION: Final = 10.0  # of the announced KV cache: more is an error, or shared prefixes alone
_MIN_AGREEMENT: Final = 0.6  # smaller slope over the larger: below it, errors prevail, which may move with the load
_MIN_DIFFERENCE: Final = 0.2  # of the announced KV cache
_MIN_CHANGE: Final = 0.05  # of the share, so that noise changes no capacity
_LEAST_KV_SHARE: Final = 0.25
_LEAST_SLOT_SHARE: Final = 0.125
_MAX_AGE_S: Final = 7200.0  # of the most running sequences, if no reading confirms them
_SAME_KV: Final = 0.05  # engines of one configuration find KV caches that differ by less

_Count = Annotated[float, Number(0.0, 1e9, digits=6)]
_Sum = Annotated[float, Number(-1e9, 1e9, digits=6)]


class KvDeviation(NamedTuple):
    """What one engine's KV cache holds, less what it held in the last minute or so: tokens by the engine's counters,
    and its used share.
    """

    tokens: float = 0.0
    used: float = 0.0


class EngineBatch(NamedTuple):
    """What one engine holds at one moment. kv_used: share of its KV cache; None if it is not reported. kv_deviation:
    None if the engine does not report all counters.
    """

    running: float
    waiting: float
    kv_used: float | None
    kv_deviation: KvDeviation | None = None

    @property
    def is_valid(self) -> bool:
        """Whether an engine can have these values; an erroneous page can have any."""
        used = 0.0 if self.kv_used is None else self.kv_used
        return 0.0 <= self.running <= _MOST_RUNNING and self.waiting >= 0.0 and 0.0 <= used <= 1.0


class MeasuredLimits(NamedTuple):
    """Limits of the engines of one tier.

    most_running: most sequences at one engine. full: readings in which many requests waited although the KV cache had
    room; full_at_most: those of them with about `most_running`. confirmed_s: time of the last of these or of the first
    reading of `most_running`, seconds since the epoch.
    readings: number of readings of deviations, decaying. tokens, used, tokens_squared, used_squared, tokens_used: sums
    over them of deviations, tokens as shares of the announced KV cache, and of their products. kv_share: size of the KV
    cache over what was announced.
    """

    most_running: _Count = 0.0
    full: _Count = 0.0
    full_at_most: _Count = 0.0
    confirmed_s: Annotated[float, Number(0.0, 1e11)] = 0.0
    readings: _Count = 0.0
    tokens: _Sum = 0.0
    used: _Sum = 0.0
    tokens_squared: _Count = 0.0
    used_squared: _Count = 0.0
    tokens_used: _Sum = 0.0
    kv_share: Annotated[float, Number(_LEAST_KV_SHARE, 1.0, digits=4)] = 1.0

    @property
    def max_sequences(self) -> float:
        """Sequences that an engine runs at once; infinite while no reading shows a limit."""
        is_limit = self.most_running >= _MIN_SLOTS and self.full_at_most >= max(_MIN_READINGS, _MIN_SHARE * self.full)
        return self.most_running if is_limit else math.inf

    def apply(self, announced: EngineLimits) -> EngineLimits:
        """Return the announced limits, or smaller ones where measured."""
        measured = max(self.max_sequences, _LEAST_SLOT_SHARE * announced.max_sequences)
        slots = max(1, int(min(measured, announced.max_sequences)))
        kv_tokens = max(1, int(announced.kv_tokens * self.kv_share))
        if (slots, kv_tokens) == (announced.max_sequences, announced.kv_tokens):
            return announced
        return replace(announced, max_sequences=slots, kv_tokens=kv_tokens)


NO_MEASURED_LIMITS: Final = MeasuredLimits()


def update_limits(
    limits: MeasuredLimits, batches: Iterable[EngineBatch], announced: EngineLimits, now_s: float
) -> MeasuredLimits:
    """Return the limits after readings of engines."""
    if limits.most_running > 0.0 and abs(now_s - limits.confirmed_s) > _MAX_AGE_S:
        limits = limits._replace(most_running=0.0, full=0.0, full_at_most=0.0)
    for batch in batches:
        if not batch.is_valid:
            continue
        limits = _count_slots(limits, batch, announced.max_sequences, now_s)
        if batch.running <= announced.max_sequences:  # more are the sum of several engines, or an error
            limits = _count_kv(limits, batch.kv_deviation, announced.kv_tokens)
    return limits._replace(kv_share=_kv_share(limits))


def is_one_configuration(announced: Collection[EngineLimits]) -> bool:
    """Whether engines that announce these limits have one configuration."""
    if len({(limits.max_sequences, limits.token_budget) for limits in announced}) > 1:
        return False
    kv_tokens = [limits.kv_tokens for limits in announced]
    return max(kv_tokens, default=0) <= (1.0 + _SAME_KV) * min(kv_tokens, default=0)


def _count_slots(limits: MeasuredLimits, batch: EngineBatch, announced: int, now_s: float) -> MeasuredLimits:
    running = min(batch.running, float(announced))
    if running > limits.most_running:
        limits = limits._replace(most_running=running, full=0.0, full_at_most=0.0, confirmed_s=now_s)
    has_room = batch.kv_used is not None and batch.kv_used < _ROOM
    if not has_room or running <= 0.0 or batch.waiting < max(1.0, _MIN_WAITING * running):
        return limits
    at_most = running >= limits.most_running - math.floor(_TOLERANCE * limits.most_running)
    confirmed_s = now_s if at_most else limits.confirmed_s
    return limits._replace(full=limits.full + 1.0, full_at_most=limits.full_at_most + at_most, confirmed_s=confirmed_s)


def _count_kv(limits: MeasuredLimits, deviation: KvDeviation | None, kv_tokens: int) -> MeasuredLimits:
    if deviation is None:
        return limits
    tokens, used, kept = deviation.tokens / kv_tokens, deviation.used, math.exp(-1.0 / _MEMORY)
    if not abs(tokens) <= _MOST_DEVIATION:
        return limits
    return limits._replace(
        readings=limits.readings * kept + 1.0,
        tokens=limits.tokens * kept + tokens,
        used=limits.used * kept + used,
        tokens_squared=limits.tokens_squared * kept + tokens**2,
        used_squared=limits.used_squared * kept + used**2,
        tokens_used=limits.tokens_used * kept + tokens * used,
    )


def _kv_share(limits: MeasuredLimits) -> float:
    """The larger slope if it is small and both agree, 1 if it is not small, else as before."""
    if limits.readings < _MIN_READINGS:
        return limits.kv_share
    tokens_variance = limits.tokens_squared - limits.tokens**2 / limits.readings
    used_variance = limits.used_squared - limits.used**2 / limits.readings
    covariance = limits.tokens_used - limits.tokens * limits.used / limits.readings
    if min(tokens_variance, used_variance) <= 0.0:
        return limits.kv_share
    if tokens_variance >= (1.0 - _MIN_DIFFERENCE) * covariance:
        return 1.0
    share = max(tokens_variance / covariance, _LEAST_KV_SHARE)
    if covariance**2 < _MIN_AGREEMENT * tokens_variance * used_variance:
        return limits.kv_share
    return share if abs(share - limits.kv_share) > _MIN_CHANGE * limits.kv_share else limits.kv_share
