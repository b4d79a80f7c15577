"""Prompt tokens in prefix caches: of one prompt by its known blocks, and of all prompts that were sent."""

from __future__ import annotations

from dataclasses import dataclass

from plimsoll.core.admission.request import AdmissionRequest
from plimsoll.core.types import KV_BLOCK_TOKENS


@dataclass(slots=True)
class PrefixTokens:
    """Prompt tokens of the requests sent to replicas, to compare with what engines found in their prefix caches.

    - `prompt`: all of them.
    - `ideal`: of these, tokens of a prefix that some replica received recently.
    - `routed`: of these, tokens of a prefix that the chosen replica received recently.

    Prompts are counted by blocks of 128 tokens, up to 512 blocks. "Recently" is as long as the caches of the replicas
    hold a prefix: each its own for `routed`, all together for `ideal`.
    """

    prompt: int = 0
    ideal: int = 0
    routed: int = 0


def prefix_tokens(request: AdmissionRequest, depth: int) -> int:
    """Returns the tokens in the prompt's first `depth` blocks: 128 each, or fewer if the text has fewer tokens."""
    if not depth:
        return 0
    return min(depth * KV_BLOCK_TOKENS, depth * request.prompt_tokens // len(request.block_hashes))
