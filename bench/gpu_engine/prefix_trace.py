"""Sessions of agents with tools, of few-shot prompts and of chats, as requests whose tokens are known.

Problem: what an engine could take from its cache must be known exactly, and the gateway must read the request as it
reads a client's.

Idea: a text is words "w123" of 5 bytes, each one token of the made tokenizer, and the chat template joins tools and
messages by spaces. So the words of a body are the engine's prompt. A later turn has the engine's own response in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Final

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

TEMPLATE: Final = (
    "{% for t in tools or [] %}{{ t['function']['description'] }} {% endfor %}"
    "{% for m in messages %}{{ m['content'] }} {% endfor %}"
)
ENGINE_BLOCK: Final = 16  # tokens of a block of vLLM's cache
THINK_S: Final = 5.0  # mean time from one turn's arrival to the next
_WORDS: Final = (100, 999)


@dataclass(frozen=True)
class Turn:
    """at_s: earliest arrival; a turn also waits for the response before it. text: the user's words."""

    at_s: float
    text: str
    output: int


@dataclass(frozen=True)
class Session:
    """tools: description of the only tool, "" without one. system: the first message, "" without one."""

    kind: str
    tools: str
    system: str
    turns: tuple[Turn, ...]


def sessions(duration_s: float, rate: float, seed: int) -> list[Session]:
    """Sessions that arrive at random at `rate` a second; turns after `duration_s` are left out."""
    random = Random(seed)
    tools = [_text(random, random.randint(*TOOL_TOKENS)) for _ in range(TOOL_SETS)]
    examples = [_text(random, random.randint(*EXAMPLE_TOKENS)) for _ in range(EXAMPLE_SETS)]
    system, found, at_s = _text(random, SYSTEM_TOKENS), [], 0.0
    while (at_s := at_s + random.expovariate(rate)) < duration_s:
        kind = draw_kind(random)
        first = draw_examples(random, examples) if kind == "few-shot" else system if kind == "chat" else ""
        turns = _turns(random, at_s, kind, duration_s)
        found.append(Session(kind, random.choice(tools) if kind == "tools" else "", first, turns))
    return found


def _text(random: Random, words: int) -> str:
    return " ".join(f"w{random.randint(*_WORDS)}" for _ in range(words))


def _turns(random: Random, at_s: float, kind: str, duration_s: float) -> tuple[Turn, ...]:
    turns = []
    for _ in range(KINDS[kind].draw_turns(random)):
        text, output = KINDS[kind].draw_lengths(random)
        turns.append(Turn(at_s, _text(random, text), output))
        at_s += random.expovariate(1.0 / THINK_S)
    return tuple(turn for turn in turns if turn.at_s < duration_s)


def body(session: Session, number: int, responses: Sequence[str], model: str = "m") -> dict[str, Any]:
    """The request of a turn, with all turns and responses before it."""
    messages = [{"role": "system", "content": session.system}] if session.system else []
    for turn, response in zip(session.turns, responses, strict=False):
        messages += [{"role": "user", "content": turn.text}, {"role": "assistant", "content": response}]
    messages.append({"role": "user", "content": session.turns[number].text})
    document: dict[str, Any] = {"model": model}
    if session.tools:
        function = {"name": "lookup", "description": session.tools, "parameters": {"type": "object", "properties": {}}}
        document |= {"tools": [{"type": "function", "function": function}], "tool_choice": "none"}
    return document | {
        "messages": messages,
        "max_tokens": session.turns[number].output,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def prompt_tokens(document: dict[str, Any]) -> list[int]:
    """The prompt as the engine sees it."""
    tools = [tool["function"]["description"] for tool in document.get("tools", ())]
    return tokens(" ".join([*tools, *(message["content"] for message in document["messages"])]))


def tokens(text: str) -> list[int]:
    """Token ids of made words."""
    return [int(word[1:]) for word in text.split()]


def chain(token_ids: Sequence[int]) -> list[int]:
    """A hash for each whole block of the engine's cache; it covers all tokens up to the end of its block."""
    state, found = 0, []
    for end in range(ENGINE_BLOCK, len(token_ids) + 1, ENGINE_BLOCK):
        state = hash((state, tuple(token_ids[end - ENGINE_BLOCK : end])))
        found.append(state)
    return found


class IdealCache:
    """One endless cache for all engines, which has a prompt as soon as it arrives, and its response when it ends."""

    def __init__(self) -> None:
        self._blocks: set[int] = set()

    def hits(self, token_ids: Sequence[int]) -> int:
        """Tokens of whole blocks that are there; vLLM computes at least the last token of a prompt."""
        found = 0
        for block in chain(token_ids):
            if block not in self._blocks:
                break
            found += ENGINE_BLOCK
        return min(found, (len(token_ids) - 1) // ENGINE_BLOCK * ENGINE_BLOCK)

    def add(self, token_ids: Sequence[int]) -> None:
        self._blocks.update(chain(token_ids))
