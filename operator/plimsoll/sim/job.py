"""One sequence in one engine: what it asks, how far it is, and what of the cache it holds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class Job:
    """One sequence in one engine. Times in seconds.

    output: tokens to make. ids: names of the prompt's blocks, for the prefix cache. remote: another engine computes
    the prompt. produce: another engine will fetch its KV here. made: output tokens put into steps; computed: tokens
    with KV; while it decodes both follow from the step's number, `shift` + step being computed and `finish` its last.
    """

    name: int
    prompt: int
    output: int
    ids: tuple[int, ...] = ()
    remote: bool = False
    produce: bool = False
    arrived_s: float = 0.0
    made: int = 0
    computed: int = 0
    blocks: int = 0  # of its own
    shared: int = 0  # first ids whose blocks it shares
    shift: int = 0
    finish: int = -1
    cached: int = 0
    moved: int = 0
    admitted: bool = False
    first_s: float | None = None
    last_s: float | None = None
