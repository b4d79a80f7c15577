"""A made trace of three kinds of requests with shared prefixes: agents with tools, few-shot prompts, and chats.

Problem: Mooncake's traces do not say which of their prefixes are tools, examples or conversations, and few of them are
shared by many users at once.

Idea: sessions of the mix arrive at random. An agent's prompt is one of several sets of tools, and all turns
before, each with a tool's result. A few-shot prompt is one of several lists of examples and a question. A chat is a
system prompt that all share, and all turns before.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from bench.picking.prefix_replay import PrefixRequest, block_hashes
from bench.session_mix import (
    EXAMPLE_SETS,
    EXAMPLE_TOKENS,
    KINDS,
    SYSTEM_TOKENS,
    TOOL_SETS,
    TOOL_TOKENS,
    draw_examples,
    draw_kind,
)

THINK_S = 15.0  # mean time from one turn's arrival to the next
Segment = tuple[int, int]  # what it is, and its tokens


def mixed_trace(duration_s: float, sessions_per_s: float, seed: int = 0) -> list[PrefixRequest]:
    """The requests in the order of their arrival; those of the last sessions may come later than `duration_s`."""
    random = Random(seed)
    tools = [(key, random.randint(*TOOL_TOKENS)) for key in range(TOOL_SETS)]
    examples = [(TOOL_SETS + key, random.randint(*EXAMPLE_TOKENS)) for key in range(EXAMPLE_SETS)]
    system = (TOOL_SETS + EXAMPLE_SETS, SYSTEM_TOKENS)
    requests: list[PrefixRequest] = []
    at_s, number = 0.0, TOOL_SETS + EXAMPLE_SETS + 1
    while (at_s := at_s + random.expovariate(sessions_per_s)) < duration_s:
        kind = draw_kind(random)
        first = system
        if kind == "few-shot":
            first = draw_examples(random, examples)
        elif kind == "tools":
            first = random.choice(tools)
        session = list(_turns(kind, first, at_s, number, random))
        requests += session
        number += 2 * len(session)
    return sorted(requests, key=lambda request: request.arrived_s)


def _turns(kind: str, first: Segment, at_s: float, number: int, random: Random) -> Iterator[PrefixRequest]:
    """One session. number: of its first own segment."""
    segments = [first]
    for turn in range(KINDS[kind].draw_turns(random)):
        text, output = KINDS[kind].draw_lengths(random)
        segments.append((number + 2 * turn, text))
        tokens = sum(count for _, count in segments)
        yield PrefixRequest(at_s, tokens, output, block_hashes(segments), kind)
        segments.append((number + 2 * turn + 1, output))
        at_s += random.expovariate(1.0 / THINK_S)
