"""Work of one step of vLLM's scheduler, and when the accelerator completes it; imports nothing of vLLM.

Steps run one after another: vLLM composes one while the previous one runs, so a step begins when it is submitted or
when its predecessor ends, whichever is later. Times are computed, not slept: a late wake-up does not delay steps
submitted earlier.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from plimsoll.sim.engine.step_timing import StepTiming


@dataclass(slots=True)
class StepWork:
    """Work of a step in the terms of `StepTiming.series`, and its requests in their order.

    tokens: prefilled. pairs: sum n (context + n / 2) over prefilled chunks. sequences: decoding. cached: their context
    tokens in the cache. request_ids: ids; emits: whether each request gets a token.
    """

    tokens: int = 0
    pairs: float = 0.0
    sequences: int = 0
    cached: int = 0
    request_ids: list[str] = field(default_factory=list)
    emits: list[bool] = field(default_factory=list)

    def add(self, request_id: str, computed: int, tokens: int, total_tokens: int) -> None:
        """Add a request's share: `tokens` behind `computed` ones, of `total_tokens` (prompt and output so far).

        A single token behind others costs as much as a decode.
        """
        if tokens == 1 and computed:
            self.sequences += 1
            self.cached += computed
        else:
            self.tokens += tokens
            self.pairs += tokens * (computed + tokens / 2)
        self.request_ids.append(request_id)
        self.emits.append(computed + tokens >= total_tokens)


class StepWorkReader:
    """Reads scheduler outputs; stores the prompts' lengths, which vLLM sends once."""

    def __init__(self) -> None:
        self._prompt_tokens: dict[str, int] = {}

    def read(self, output: Any) -> StepWork:
        """Return the work of one `vllm.v1.core.sched.output.SchedulerOutput`."""
        work, tokens, cached = StepWork(), output.num_scheduled_tokens, output.scheduled_cached_reqs
        for new in output.scheduled_new_reqs:
            prompt = self._prompt_tokens[new.req_id] = len(new.prompt_token_ids)
            work.add(new.req_id, new.num_computed_tokens, tokens[new.req_id], prompt)
        for name, computed, output_tokens in zip(
            cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens, strict=True
        ):
            work.add(name, computed, tokens[name], self._prompt_tokens[name] + output_tokens)
        self._forget(output.finished_req_ids)
        return work

    def _forget(self, names: Iterable[str]) -> None:
        for name in names:
            self._prompt_tokens.pop(name, None)


class AcceleratorClock:
    """The accelerator's time. scale: seconds of the clock per second of `timing`."""

    def __init__(self, timing: StepTiming, scale: float = 1.0) -> None:
        self._timing, self._scale = timing, scale
        self._steps = 0
        self._busy_until_s = -math.inf

    def end_s(self, work: StepWork, now_s: float) -> float:
        """Return when a step that is submitted now ends; both on one monotonic clock."""
        start_s = max(now_s, self._busy_until_s)
        timing = self._timing
        if start_s / self._scale >= timing.next_heat_update_s:
            timing.update_heat(start_s / self._scale)
        series = timing.series(self._steps, work.tokens, work.pairs, work.sequences, work.cached)
        step_s = timing.duration_s(series, 1)
        timing.add_compute(work.tokens, work.pairs, work.sequences)
        self._steps += 1
        self._busy_until_s = start_s + step_s * self._scale
        return self._busy_until_s
