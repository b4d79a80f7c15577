"""Limits of an engine that its readings contradict: sequences that it runs at once, and tokens in its KV cache.

Problem: an engine may hold less than it announced, because of an argument, a proxy or another process. Requests then
wait inside the engine, where no model expects them: sizing and admission count on places that are not there.

Idea: what an engine runs while many requests wait for it is all that it can run. If the KV cache has room, and the
running sequences are mostly as many as there ever were, that number is the limit. The KV cache holds the tokens of the
running sequences, by the request lengths, over the share of it that they fill. A reading with more running sequences
ends the first, and new readings replace the second.

The most that ever ran, and a limit by it, also end without evidence for two hours: gateways send no more than a limit
allows, so it would never be contradicted, and one reading in error would hide all limits below it. An engine that is
busy with long prompts can look like one with few places, so the limit is at least an eighth of what was announced.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Annotated, Final, NamedTuple

from plimsoll.core.capacity.kv_capacity import resident_tokens
from plimsoll.core.codec import Number
from plimsoll.core.engine_model.step_time import EngineLimits
from plimsoll.core.workload import Workload

_MIN_READINGS: Final = 8.0  # with the most running sequences while others wait
_MIN_SHARE: Final = 0.5  # of the readings in which others wait
_MIN_WAITING: Final = 0.25  # of the running sequences; fewer may wait for the next step
_MIN_SLOTS: Final = 8.0  # fewer may run because a long prompt takes the token budget of a step
_MOST_RUNNING: Final = 1e9  # of a page that is in error
_TOLERANCE: Final = 0.02  # of the running sequences: those that end within a step
_ROOM: Final = 0.9  # share of the KV cache above which sequences may wait for it
_MIN_KV_USED: Final = 0.5  # with less, single sequences and rounding weigh too much
_MIN_SEQUENCES: Final = 300.0
_MEMORY: Final = 3000.0  # sequences, each counted once in a reading
_MIN_DIFFERENCE: Final = 0.2  # of the announced KV cache: less is within the error of request lengths
_MIN_CHANGE: Final = 0.1  # of the share, so that noise changes no capacity
_LEAST_KV_SHARE: Final = 0.25
_LEAST_SLOT_SHARE: Final = 0.125
_MAX_AGE_S: Final = 7200.0  # of the most running sequences, if no reading confirms them
_SAME_KV: Final = 0.05  # engines of one configuration find KV caches that differ by less

_Count = Annotated[float, Number(0.0, 1e9, digits=6)]


class EngineBatch(NamedTuple):
    """What one engine holds at one moment. kv_used: share of its KV cache; None if it is not reported."""

    running: float
    waiting: float
    kv_used: float | None

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
    sequences, kv_used: sums over readings, decaying. kv_share: size of the KV cache over what was announced.
    """

    most_running: _Count = 0.0
    full: _Count = 0.0
    full_at_most: _Count = 0.0
    confirmed_s: Annotated[float, Number(0.0, 1e11)] = 0.0
    sequences: _Count = 0.0
    kv_used: _Count = 0.0
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
    limits: MeasuredLimits,
    batches: Iterable[EngineBatch],
    announced: EngineLimits,
    workload: Workload,
    is_decode: bool,
    now_s: float,
) -> MeasuredLimits:
    """Return the limits after readings of engines. is_decode: waiting requests may hold KV that they receive."""
    if limits.most_running > 0.0 and abs(now_s - limits.confirmed_s) > _MAX_AGE_S:
        limits = limits._replace(most_running=0.0, full=0.0, full_at_most=0.0)
    for batch in batches:
        if not batch.is_valid:
            continue
        limits = _count_slots(limits, batch, announced.max_sequences, now_s)
        if 1.0 <= batch.running <= announced.max_sequences:  # more are the sum of several engines, or an error
            limits = _count_kv(limits, batch, is_decode)
    if limits.sequences < _MIN_SEQUENCES or limits.kv_used <= 0.0:
        return limits
    share = limits.sequences * resident_tokens(workload) / limits.kv_used / announced.kv_tokens
    share = max(share, _LEAST_KV_SHARE) if share < 1.0 - _MIN_DIFFERENCE else 1.0
    is_change = abs(share - limits.kv_share) > _MIN_CHANGE * limits.kv_share
    return limits._replace(kv_share=share) if is_change else limits


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


def _count_kv(limits: MeasuredLimits, batch: EngineBatch, is_decode: bool) -> MeasuredLimits:
    if batch.kv_used is None or batch.kv_used < _MIN_KV_USED or (is_decode and batch.waiting > 0.0):
        return limits
    kept = math.exp(-batch.running / _MEMORY)
    return limits._replace(
        sequences=limits.sequences * kept + batch.running, kv_used=limits.kv_used * kept + batch.kv_used
    )
