"""LoRA adapters in the GPU memory of one engine.

Idea: vLLM's rule. An engine has `max_adapters` places (`--max-loras`), and a step may use no more adapters than that.
An adapter without a place is copied from CPU memory before the step, in place of the one that was used least recently.
"""

from __future__ import annotations

from collections.abc import Iterable


class GpuAdapters:
    """The adapters of one engine in the order of their last use. max_adapters: places, 0 for an engine without LoRA."""

    def __init__(self, max_adapters: int) -> None:
        self.max_adapters = max_adapters
        self._by_use: dict[str, None] = {}

    def use(self, adapters: Iterable[str]) -> int:
        """Use the adapters of one step. Returns how many of them were copied to the GPU."""
        loads, by_use = 0, self._by_use
        for adapter in adapters:
            if adapter in by_use:
                del by_use[adapter]
            else:
                loads += 1
            by_use[adapter] = None
        while len(by_use) > self.max_adapters:
            del by_use[next(iter(by_use))]
        return loads
