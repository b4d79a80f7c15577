"""How long requests are: their joint lengths from the engines' histograms, and an arrival's mean prompt.

Problem: what a request will cost is wanted when it arrives, and there only its bytes are known. Engines know tokens,
but of requests that ended, minutes later; they do not say what belongs together, and a tier that prefills for others
sees one output token each.

Idea: two means over the same minutes, of the tokens that gateways estimate from bytes and of those that engines count,
make the ratio that turns the one into the other. Lengths of those that ended fade over minutes: they give the shape,
and are brought to the prompts that arrive now, and to the output of now. That is the tokens that engines made in the
last half minute over those that they should have made of answers of the known lengths (`answers`): while answers grow
longer, those that ended are the short ones, yet the tokens of the others are counted already. Before any has ended, an
answer is at least as long as it is by now: an engine with more than it can carry ends none for the better part of a
minute, and is the one that must be known. Where prompts that arrive, or tokens that are made, show surely that another
mix comes, all that ended before the last half minute is forgotten: a mixture of the two mixes has lengths that no load
has, and the former one would be half of what is known for minutes. Cached tokens are a share of each prompt, the same
for all: engines count them only in sum.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np

from plimsoll.core.buckets import count
from plimsoll.core.chance import beyond
from plimsoll.core.forecast import Unknown
from plimsoll.core.ports import Buckets
from plimsoll.core.signals.answers import Answers, Usual
from plimsoll.core.signals.intervals import EngineInterval, ServiceInterval
from plimsoll.core.signals.memory import Faded, Recent
from plimsoll.core.workload import FloatArray, Histogram, Workload, from_histograms, from_samples

_MEMORY_S: Final = 300.0
_LATELY_S: Final = 30.0
_CHANCE: Final = 2.0  # standard errors by which the mean output of late must differ to be another mix
_SURELY: Final = 4.0  # standard errors beyond which it is: chance does that once in 16,000 looks
_LEAST: Final = 100.0  # requests that lengths are kept of, however long they take to come
_KNOWN: Final = 5.0  # fewer requests say nothing of lengths
_PRIOR: Final = 20.0  # requests' worth of belief that an estimate from bytes is right
_REBUILD_S: Final = 30.0
_OFF: Final = 0.1  # a mean that differs by a larger share is news
_SAME: Final = 0.01


class _Lengths(NamedTuple):
    prompt: Buckets
    output: Buckets


class _Means(NamedTuple):
    requests: float
    tokens: float


class _Answers(NamedTuple):
    """Of some time: requests begun, tokens made, and requests' worth of tokens that should have been made."""

    begun: float
    tokens: float
    requests: float


class _Sources(NamedTuple):
    computed: float
    saved: float


class _Given(NamedTuple):
    """The last answer, and what it was made of: lengths without a cached token, the factors of prompts and outputs, the
    cached share."""

    base: Workload
    factors: tuple[float, float]
    share: float
    workload: Workload

    def near(self, factors: tuple[float, float], share: float) -> bool:
        """Whether another answer would not differ by more than a hundredth."""
        moved = any(abs(new - old) > _SAME * old for old, new in zip(self.factors, factors, strict=True))
        return not moved and abs(share - self.share) <= _SAME


class Lengths:
    """Of one service's requests."""

    def __init__(self) -> None:
        self._ended: Faded[_Lengths] = Faded(_MEMORY_S, _LEAST)
        self._ended_lately: Recent[_Lengths] = Recent(_LATELY_S)
        self._answers: Recent[_Answers] = Recent(_LATELY_S)
        self._estimated: Faded[_Means] = Faded(_MEMORY_S, _LEAST)
        self._counted: Faded[_Means] = Faded(_MEMORY_S, _LEAST)
        self._sources: Faded[_Sources] = Faded(_MEMORY_S, _LEAST)
        self._built: tuple[float, float, float, Workload] | None = None  # when, of which means (tokens), what
        self._usual: Usual | None = None  # of the outputs in what was built
        self._mean = 1.0  # of the prompts in what was built
        self._another_s = -math.inf  # when another mix was last seen to come
        self._given: _Given | None = None
        self._begun: Workload | None = None

    def arrived(self, at_s: float, interval: ServiceInterval) -> None:
        """What a gateway counted until at_s."""
        if interval.sized is not None and interval.arrived_tokens is not None:
            self._estimated.add(at_s, interval.sized, _Means(interval.sized, interval.arrived_tokens))

    def answered(self, at_s: float, interval: EngineInterval, answers: Answers | None) -> None:
        """What an engine that answers clients counted until at_s; answers: its own, where they are known."""
        if interval.prompt_tokens is not None and interval.output_tokens is not None:
            lengths = _Lengths(interval.prompt_tokens, interval.output_tokens)
            self._ended.add(at_s, count(interval.prompt_tokens), lengths)
            self._ended_lately.add(at_s, lengths)
        if interval.ttft_s is not None and interval.generated_tokens is not None:
            begun = requests = count(interval.ttft_s)
            if answers is not None and self._usual is not None:
                requests = answers.requests(self._usual)
            self._answers.add(at_s, _Answers(begun, interval.generated_tokens, requests))
        means = _prompts(interval)
        if means is not None:
            self._counted.add(at_s, means.requests, means)

    def prefilled(self, at_s: float, interval: EngineInterval) -> None:
        """What an engine that prefills, for itself or for others, counted until at_s."""
        computed, cached = interval.local_prompt_tokens, interval.cached_prompt_tokens
        if computed is not None and cached is not None:
            # Blocks that came from a store or another engine were not computed here either.
            saved = cached + (interval.moved_prompt_tokens or 0.0)
            requests = float(computed + saved > 0.0) if interval.ttft_s is None else count(interval.ttft_s)
            self._sources.add(at_s, requests, _Sources(computed, saved))

    @property
    def cached_share(self) -> float:
        """Share of prompt tokens that no prefill computes; 0 where engines do not tell: too much work, never too
        little."""
        known = self._sources.sum
        return known.saved / (known.computed + known.saved) if known and known.saved > 0.0 else 0.0

    def prompt_tokens(self, recent: ServiceInterval | None) -> float | Unknown:
        """Mean of the arrivals of the last minute."""
        if recent is None or recent.arrived <= 0.0:
            return Unknown("nothing arrived in the last minute")
        estimate, counted = self._estimated.sum, self._counted.sum
        if recent.sized and recent.arrived_tokens and estimate is not None:
            return recent.arrived_tokens / recent.sized * _ratio(estimate, counted)
        if counted is None or counted.requests < _KNOWN:
            return Unknown("neither gateways nor engines count prompt tokens")
        return counted.tokens / counted.requests

    def workload(self, now_s: float, prompt_tokens: float | Unknown, arrived: float) -> Workload | Unknown:
        """Joint lengths; their means those of arriving prompts where these differ by more than a tenth, and of the
        outputs of late where these are longer by more. arrived: requests in the mean of `prompt_tokens`."""
        ended = self._ended.sum
        if ended is None or self._ended.weight < _KNOWN:
            return self._least(now_s)
        base = self._base(now_s, ended)
        if isinstance(base, Unknown):
            return base
        arriving = 1.0 if isinstance(prompt_tokens, Unknown) else prompt_tokens / self._mean
        made, requests = self._made(now_s, base)
        if self._is_another(arriving, base.uncached_tokens, arrived, base) or self._is_another(
            made, base.output_tokens, requests, base
        ):
            self._another_s = now_s
        if 0.0 <= now_s - self._another_s < _LATELY_S:
            self._forget(now_s)
        outputs = max(1.0, _beyond(made, max(_OFF, _CHANCE * self._error(base.output_tokens, requests, base))))
        factors, share = (_beyond(arriving, _OFF), outputs), self.cached_share
        if self._given is None or self._given.base is not base or not self._given.near(factors, share):
            self._given = _Given(base, factors, share, _shaped(base, factors, share))
        return self._given.workload

    def _least(self, now_s: float) -> Workload | Unknown:
        """Requests that have begun to be answered, as long as their answers are by now, while too few have ended."""
        lately, counted, old = self._answers.over(now_s), self._counted.sum, self._begun
        if lately is None or counted is None or not (min(lately.begun, counted.requests) >= _KNOWN and counted.tokens):
            return Unknown(f"too few requests have ended to know their lengths: {self._ended.weight:.0f}")
        prompt, output = counted.tokens / counted.requests, max(lately.tokens / lately.begun, 1.0)
        cached = max(0.0, min(prompt * self.cached_share, prompt - 1.0))
        new = np.array(((max(prompt - cached, 1.0),), (cached,), (output,)))
        if old is None or np.any(
            np.abs(new - (old.uncached_tokens, old.cached_tokens, old.output_tokens)) > _SAME * new
        ):
            self._begun = old = from_samples(*new)
        return old

    def _made(self, now_s: float, base: Workload) -> tuple[float, float]:
        """The mean output of late over that of the base, and of how many requests it is; 1 of none where that is not
        known. By tokens, since shorter answers end first and are too many of those that ended of late."""
        lately = self._answers.over(now_s)
        if lately is None or lately.requests < _KNOWN or not lately.tokens > 0.0:
            return 1.0, 0.0
        return lately.tokens / lately.requests / base.mean(base.output_tokens), lately.requests

    def _error(self, lengths: FloatArray, requests: float, base: Workload) -> float:
        """Of the mean of so many requests over that of those that ended: both are of lengths that are drawn."""
        if requests <= 0.0:
            return math.inf
        return math.sqrt((base.scv(lengths) or 0.0) * (1.0 / requests + 1.0 / self._ended.weight))

    def _is_another(self, factor: float, lengths: FloatArray, requests: float, base: Workload) -> bool:
        """Whether a mean that is so many times that of those that ended is surely no chance."""
        return abs(factor - 1.0) > max(_OFF, _SURELY * self._error(lengths, requests, base))

    def _forget(self, now_s: float) -> None:
        """Keep of those that ended the last ones alone: for half a minute from the last sign on, so that none of the
        mix before is among them."""
        lately = self._ended_lately.over(now_s)
        self._ended.forget(lately, 0.0 if lately is None else count(lately.prompt))

    def _base(self, now_s: float, ended: _Lengths) -> Workload | Unknown:
        """Lengths without cached tokens; made anew now and then, or when a mean has moved: it takes milliseconds."""
        means = (_mean(ended.prompt), _mean(ended.output))
        if self._built is not None and _near(self._built, now_s, means):
            return self._built[3]
        try:
            base = from_histograms(_histogram(ended.prompt), _histogram(ended.output))
        except ValueError as error:
            return Unknown(f"the engines' histograms of lengths do not make sense: {error}")
        self._built, self._mean, self._usual = (now_s, *means, base), base.mean(base.uncached_tokens), Usual(base)
        return base


def _beyond(factor: float, chance: float) -> float:
    """What is left of a factor that may be by chance: 1 up to it, all of it well beyond."""
    return 1.0 + math.copysign(beyond(abs(factor - 1.0), chance), factor - 1.0)


def _shaped(base: Workload, factors: tuple[float, float], share: float) -> Workload:
    prompts = np.maximum(base.uncached_tokens * factors[0], 1.0)
    cached = np.minimum(prompts * share, prompts - 1.0)  # the last token is always computed
    outputs = np.maximum(base.output_tokens * factors[1], 1.0)
    return replace(base, uncached_tokens=prompts - cached, cached_tokens=cached, output_tokens=outputs)


def _prompts(interval: EngineInterval) -> _Means | None:
    """Prompt tokens of the requests that began to be answered.

    Those that ended are the second choice: clients that went away are not among them, and theirs were the long ones.
    """
    sources = (interval.local_prompt_tokens, interval.cached_prompt_tokens, interval.moved_prompt_tokens)
    known = [tokens for tokens in sources if tokens is not None]
    if interval.ttft_s is not None and interval.local_prompt_tokens is not None:
        return _Means(count(interval.ttft_s), math.fsum(known))
    if interval.prompt_tokens is not None:
        return _Means(count(interval.prompt_tokens), interval.prompt_tokens.total)
    return None


def _ratio(estimate: _Means, counted: _Means | None) -> float:
    """Real over estimated tokens of a request, drawn to 1 while few are known."""
    mean = estimate.tokens / estimate.requests
    if counted is None or mean <= 0.0:
        return 1.0
    return (counted.tokens + _PRIOR * mean) / ((counted.requests + _PRIOR) * mean)


def _mean(b: Buckets) -> float:
    """0 where nothing is known of it."""
    size = count(b)
    return b.total / size if size > 0.0 else 0.0


def _histogram(b: Buckets) -> Histogram:
    """Of the open bucket only the mean tells how far it goes; twice its edge is a guess at the rest."""
    longest = 2.0 * b.edges[-2] if len(b.edges) > 1 and b.counts[-1] > 0.0 else None
    return Histogram(np.array(b.edges), np.array(b.counts), _mean(b) or None, longest)


def _near(built: tuple[float, float, float, Workload], now_s: float, means: tuple[float, float]) -> bool:
    at_s, *of, _ = built
    moved = any(abs(new - old) > _OFF * old for old, new in zip(of, means, strict=True))
    return 0.0 <= now_s - at_s < _REBUILD_S and not moved
