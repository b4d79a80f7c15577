"""A made trace of three kinds of requests with shared prefixes: agents with tools, few-shot prompts, and chats.

Problem: Mooncake's traces do not say which of their prefixes are tools, examples or conversations, and few of them are
shared by many users at once.

Idea: sessions arrive at random. An agent's prompt is one of several sets of tools, and all turns before, each with a
tool's result. A few-shot prompt is one of several lists of examples, some much more frequent than others,
and a question. A chat is a system prompt that all share, and all turns before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from random import Random

from bench.picking.prefix_replay import PrefixRequest, block_hashes

TOOL_SETS, EXAMPLE_SETS = 6, 12
SHARES = {"tools": 0.25, "few-shot": 0.5, "chat": 0.25}  # of the sessions
THINK_S = 15.0  # mean time from one turn's arrival to the next
Segment = tuple[int, int]  # what it is, and its tokens


def mixed_trace(duration_s: float, sessions_per_s: float, seed: int = 0) -> list[PrefixRequest]:
    """The requests in the order of their arrival; those of the last sessions may come later than `duration_s`."""
    random = Random(seed)
    tools = [(key, random.randint(1500, 4000)) for key in range(TOOL_SETS)]
    examples = [(TOOL_SETS + key, random.randint(1500, 3000)) for key in range(EXAMPLE_SETS)]
    system = (TOOL_SETS + EXAMPLE_SETS, 300)
    requests: list[PrefixRequest] = []
    at_s, number = 0.0, TOOL_SETS + EXAMPLE_SETS + 1
    while (at_s := at_s + random.expovariate(sessions_per_s)) < duration_s:
        kind = random.choices(list(SHARES), list(SHARES.values()))[0]
        if kind == "few-shot":
            first = random.choices(examples, [1 / (rank + 1) for rank in range(EXAMPLE_SETS)])[0]
            turns = _turns(kind, first, at_s, number, 1, (120.0, 60.0), random)
        elif kind == "tools":
            turns = _turns(kind, random.choice(tools), at_s, number, random.randint(3, 12), (350.0, 120.0), random)
        else:
            turns = _turns(kind, system, at_s, number, random.randint(2, 8), (150.0, 250.0), random)
        session = list(turns)
        requests += session
        number += 2 * len(session)
    return sorted(requests, key=lambda request: request.arrived_s)


def _turns(
    kind: str, first: Segment, at_s: float, number: int, turns: int, medians: tuple[float, float], random: Random
) -> Iterator[PrefixRequest]:
    """One session. number: of its first own segment. medians: tokens of a turn's text and of its response."""
    segments = [first]
    for turn in range(turns):
        text, output = (max(8, round(median * math.exp(random.gauss(0.0, 0.6)))) for median in medians)
        segments.append((number + 2 * turn, text))
        tokens = sum(count for _, count in segments)
        yield PrefixRequest(at_s, tokens, output, block_hashes(segments), kind)
        segments.append((number + 2 * turn + 1, output))
        at_s += random.expovariate(1.0 / THINK_S)
