"""What a step of vLLM's scheduler has to do, and when the accelerator is done with it; nothing of vLLM is imported.

Steps run one after another: vLLM composes one while the one before it runs, so that a step begins when it was handed
over or when its predecessor ends, whichever is later. Times are kept, not slept: who wakes up late does not delay what
was handed over before.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from simulated.plant import Plant


@dataclass(slots=True)
class Work:
    """A step in the terms of `simulated.plant.Plant.seconds`, and its requests in their order.

    tokens: prefilled. pairs: sum n (context + n / 2) over prefilled chunks. sequences: decoding, with so many tokens of
    context in the cache. names: request ids; emits: whether each gets a token.
    """

    tokens: int = 0
    pairs: float = 0.0
    sequences: int = 0
    cached: int = 0
    names: list[str] = field(default_factory=list)
    emits: list[bool] = field(default_factory=list)

    def put(self, name: str, computed: int, tokens: int, known: int) -> None:
        """A request's share: `tokens` behind `computed` ones, of `known` tokens (prompt and answer so far) in all.

        One token behind others costs what a decode costs, whatever it is.
        """
        if tokens == 1 and computed:
            self.sequences += 1
            self.cached += computed
        else:
            self.tokens += tokens
            self.pairs += tokens * (computed + tokens / 2)
        self.names.append(name)
        self.emits.append(computed + tokens >= known)


class Counter:
    """Reads scheduler outputs; keeps the prompts' lengths, which vLLM tells once."""

    def __init__(self) -> None:
        self._prompts: dict[str, int] = {}

    def work(self, output: Any) -> Work:
        """Of one `vllm.v1.core.sched.output.SchedulerOutput`."""
        work, tokens, cached = Work(), output.num_scheduled_tokens, output.scheduled_cached_reqs
        for new in output.scheduled_new_reqs:
            prompt = self._prompts[new.req_id] = len(new.prompt_token_ids)
            work.put(new.req_id, new.num_computed_tokens, tokens[new.req_id], prompt)
        for name, computed, made in zip(
            cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens, strict=True
        ):
            work.put(name, computed, tokens[name], self._prompts[name] + made)
        self._forget(output.finished_req_ids)
        return work

    def _forget(self, names: Iterable[str]) -> None:
        for name in names:
            self._prompts.pop(name, None)


class Card:
    """The accelerator's time. scale: seconds of the clock for each of the plant's."""

    def __init__(self, plant: Plant, scale: float = 1.0) -> None:
        self._plant, self._scale = plant, scale
        self._free_s = -math.inf

    def ends_s(self, work: Work, now_s: float) -> float:
        """When a step that is handed over now is over; both on one monotonic clock."""
        start_s = max(now_s, self._free_s)
        took_s = self._plant.seconds(start_s / self._scale, work.tokens, work.pairs, work.sequences, work.cached)
        self._free_s = start_s + took_s * self._scale
        return self._free_s
