"""One tier's engines, from their readings.

Problem: pods come and go, answer or do not, and each counts for itself. The sum of those that answered is not the
tier's, their mean is not either, and a percentile of percentiles is nothing.

Idea: pods keep only their last reading; what they counted goes into the tier's own last minute, as sums and as one
histogram. Gauges are summed over the pods that exist now, scaled up from those whose word is fresh.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from plimsoll.core.buckets import count, quantile
from plimsoll.core.calibration.window import WindowSums
from plimsoll.core.forecast import Unknown
from plimsoll.core.gaps import SHARE as GAP_SHARE
from plimsoll.core.picking.endpoint import Role
from plimsoll.core.ports import Buckets, EngineReading
from plimsoll.core.scaling.observation import Measured, summed
from plimsoll.core.signals.answers import Answers
from plimsoll.core.signals.busy import Open, Pace
from plimsoll.core.signals.heard import TierHeard
from plimsoll.core.signals.intervals import GAP_S, EngineInterval, engine_interval, is_fresh, is_later
from plimsoll.core.signals.memory import WINDOW_S, Faded, Recent
from plimsoll.core.signals.percentile import percentile

_WINDOWS: Final = 512  # kept until they are asked for

_NOT_TOLD: Final = Unknown("the engines do not tell")
_NONE_ENDED: Final = Unknown("no request ended in the last minute")
_NO_GAPS: Final = Unknown("no answer had a second token in the last minute")
_NO_PODS: Final = Unknown("the tier has no pods")
_DECODES_NOTHING: Final = Unknown("a prefill engine decodes nothing")
_CLIENTS_DO: Final = Unknown("the time to the first token is that of the prefill tier")


class _Minute(NamedTuple):
    """What the tier's pods counted. Each count comes with the seconds in which it was counted."""

    preemptions: float | None = None
    preemptions_s: float | None = None
    post_s: float | None = None
    post_over_s: float | None = None
    busy_steps: float | None = None
    busy_s: float | None = None
    tpot_s: Buckets | None = None
    ttft_s: Buckets | None = None
    gaps_s: Buckets | None = None
    ended: float | None = None


class _Paced(NamedTuple):
    """Requests that ended, their summed times per output token, and tokens and steps of running sequences."""

    ended: float
    tpot_s: float
    generated_tokens: float
    sequence_steps: float


@dataclass(slots=True)
class _Pod:
    last: EngineReading
    open: Open = field(default_factory=Open)
    answers: Answers | None = None

    def begin(self) -> None:
        """Nothing is known of what was before the last reading."""
        self.open.begin(self.last)
        self.answers = None


class Tier:
    """The engines of one role of one service."""

    def __init__(self, role: Role) -> None:
        self._role = role
        self._pods: dict[str, _Pod] = {}
        self._recent: Recent[_Minute] = Recent()
        self._paced: Faded[_Paced] = Faded(WINDOW_S, 0.0)
        self._windows: deque[WindowSums] = deque(maxlen=_WINDOWS)

    def hear(self, reading: EngineReading) -> EngineInterval | None:
        """What the engine counted since its last reading; None if that is not known, or this one is no news.

        reading: `answered`, at a time.
        """
        known = self._pods.get(reading.pod)
        if known is None:
            self._forget(reading.at_s, ())
            known = self._pods[reading.pod] = _Pod(reading)
            known.begin()
            return None
        if not is_later(reading.at_s, known.last.at_s):
            return None
        last, known.last = known.last, reading
        interval = engine_interval(last, reading)
        if interval is None:
            known.begin()
            return None
        self._learn_pace(interval, last, reading)
        pace = self._pace()
        known.answers = _followed(known.answers, last.running, interval, pace)
        window = known.open.add(last, reading, interval, pace)
        if window is not None:
            self._windows.append(window)
        self._recent.add(reading.at_s, _minute(interval, window))
        return interval

    def answers(self, pod: str) -> Answers | None:
        """Of an engine of which an interval was heard; None where it does not tell what it takes to follow them."""
        return self._pods[pod].answers

    def heard(
        self,
        now_s: float,
        pods: Collection[str],
        share: float,
        clients_ttft_s: float | Unknown,
        clients_e2e_s: float | Unknown,
    ) -> TierHeard:
        """What is known now. pods: those that exist. share: the promised percentile. Hands out the new windows."""
        self._forget(now_s, pods)
        windows = tuple(self._windows)
        self._windows.clear()
        parts = [self._pods[name].last if self._is_fresh(name, now_s) else None for name in pods]
        fresh = [part for part in parts if part is not None]
        if not fresh:
            why = Unknown(f"none of {len(pods)} pods has answered for {GAP_S:.0f} s") if pods else _NO_PODS
            return TierHeard(
                Measured(why, why, why, why, why, why, why),
                0.0 if pods else 1.0,
                None,
                windows,
                running=why,
                step_rate_per_s=why,
                post_share=why,
            )
        minute = self._recent.over(now_s) or _Minute()
        return TierHeard(
            Measured(
                tpot_s=_DECODES_NOTHING if self._role is Role.PREFILL else _percentile(minute.tpot_s, share),
                ttft_s=self._ttft(minute, share, clients_ttft_s),
                waiting=summed([_NOT_TOLD if part is None else _told(part.waiting) for part in parts])[0],
                kv_used=max((part.kv_used for part in fresh if part.kv_used is not None), default=_NOT_TOLD),
                preemptions_per_s=_per_s(minute.preemptions, minute.preemptions_s, len(pods)),
                e2e_s=_DECODES_NOTHING if self._role is Role.PREFILL else clients_e2e_s,
                itl_s=_DECODES_NOTHING if self._role is Role.PREFILL else _gap(minute.gaps_s),
            ),
            coverage=len(fresh) / len(parts),
            age_s=max(max(0.0, now_s - part.at_s) for part in fresh),
            windows=windows,
            running=summed([_here(part) for part in fresh])[0],
            step_rate_per_s=_per_s(minute.busy_steps, minute.busy_s),
            post_share=_per_s(minute.post_s, minute.post_over_s),
            paces=None if self._role is Role.PREFILL else minute.tpot_s,
            ended=minute.ended or 0.0,
        )

    def _ttft(self, minute: _Minute, share: float, clients_ttft_s: float | Unknown) -> float | Unknown:
        if self._role is Role.SERVE:
            return clients_ttft_s
        return _percentile(minute.ttft_s, share) if self._role is Role.PREFILL else _CLIENTS_DO

    def _learn_pace(self, interval: EngineInterval, last: EngineReading, new: EngineReading) -> None:
        if not last.running or not new.running or interval.steps is None or interval.generated_tokens is None:
            return
        tpot = interval.tpot_s
        running = (last.running + new.running) / 2.0
        ended, total_s = (0.0, 0.0) if tpot is None else (count(tpot), tpot.total)
        paced = _Paced(ended, total_s, interval.generated_tokens, running * interval.steps)
        self._paced.add(new.at_s, interval.seconds, paced)

    def _pace(self) -> Pace:
        known = self._paced.sum
        if known is None:
            return Pace()
        return Pace(
            known.tpot_s / known.ended if known.ended > 0.0 else None,
            known.generated_tokens / known.sequence_steps if known.sequence_steps > 0.0 else None,
        )

    def _is_fresh(self, pod: str, now_s: float) -> bool:
        known = self._pods.get(pod)
        return known is not None and is_fresh(known.last.at_s, now_s, GAP_S)

    def _forget(self, now_s: float, pods: Collection[str]) -> None:
        """Drop pods that are neither there nor lately heard."""
        for name in [name for name in self._pods if name not in pods and not self._is_fresh(name, now_s)]:
            del self._pods[name]


def _minute(interval: EngineInterval, window: WindowSums | None) -> _Minute:
    seconds = interval.seconds
    return _Minute(
        preemptions=interval.preemptions,
        preemptions_s=None if interval.preemptions is None else seconds,
        post_s=interval.post_s,
        post_over_s=None if interval.post_s is None else seconds,
        busy_steps=None if window is None else window.steps,
        busy_s=None if window is None else window.busy_s,
        tpot_s=interval.tpot_s,
        ttft_s=interval.ttft_s,
        gaps_s=interval.gaps_s,
        ended=None if interval.output_tokens is None else count(interval.output_tokens),
    )


def _followed(answers: Answers | None, running: float | None, interval: EngineInterval, pace: Pace) -> Answers | None:
    """With what the engine counted since, where it tells what is needed; its steps are the clock. running: before."""
    if interval.steps is None or interval.ttft_s is None or running is None:
        return None
    answers = answers or Answers(running)
    answers.add(interval.steps * pace.step_tokens, count(interval.ttft_s))
    return answers


def _here(reading: EngineReading) -> float | Unknown:
    return _NOT_TOLD if reading.running is None else reading.running + (reading.waiting or 0.0)


def _percentile(b: Buckets | None, share: float) -> float | Unknown:
    value = None if b is None else percentile(b, share)
    return (_NOT_TOLD if b is None else _NONE_ENDED) if value is None else value


def _gap(b: Buckets | None) -> float | Unknown:
    """The percentile that a promise of gaps is of. Steps with a prompt and steps without are two humps, to which no one
    law fits: inside a bucket gaps are taken as evenly spread, but for the first one, where the mean says more."""
    even = None if b is None else quantile(b, GAP_SHARE)
    if b is None or even is None:
        return _NOT_TOLD if b is None else _NO_GAPS
    return even if even > b.edges[0] else percentile(b, GAP_SHARE) or even


def _told(value: float | None) -> float | Unknown:
    return _NOT_TOLD if value is None else value


def _per_s(amount: float | None, seconds: float | None, pods: int = 1) -> float | Unknown:
    """Of so many pods, from the pods that told."""
    return _NOT_TOLD if amount is None or not seconds else amount / seconds * pods
