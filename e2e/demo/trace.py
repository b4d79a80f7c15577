"""The demo's load: real arrivals and real lengths, thinned to what two cores carry.

A trace is never compressed in time (that would change its bursts into something nobody saw): every second request of
it is sent at its own moment. Requests longer than the demo engine's context are left out, and so are those of less
than two KV blocks: a prompt that fills no block is read where it is decoded, and the demo shows the transfer.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

from e2e.lib.client import Prompt
from e2e.lib.load import Arrival, OpenLoop, unique_text

TRACE = Path(__file__).with_name("azure2023_code.csv")
KEEP_EVERY = 2
CONTEXT_TOKENS = 4000  # below the engine's --max-model-len, with room for the chat template
LEAST_PROMPT_TOKENS = 256  # two blocks; the gateway only guesses tokens from bytes
MAX_OUTPUT_TOKENS = 64  # longer answers show nothing more


@dataclass(frozen=True, slots=True)
class Row:
    """One request of the trace: seconds after its start, tokens in, tokens out."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int


def read(path: Path = TRACE) -> list[Row]:
    """All rows; lines that begin with # name the source and its licence."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    found = csv.DictReader(lines)
    return [Row(float(r["arrival_s"]), int(r["prompt_tokens"]), int(r["output_tokens"])) for r in found]


def thin(rows: list[Row], every: int = KEEP_EVERY, limit_tokens: int = CONTEXT_TOKENS) -> list[Row]:
    """Every n-th of the rows that fit into the context and fill two blocks, times counted from the first one."""
    fitting = (row for row in rows if row.prompt_tokens + row.output_tokens <= limit_tokens)
    kept = [row for row in fitting if row.prompt_tokens >= LEAST_PROMPT_TOKENS][::every]
    origin = kept[0].arrival_s if kept else 0.0
    return [Row(row.arrival_s - origin, row.prompt_tokens, row.output_tokens) for row in kept]


def plan(rows: list[Row], tokens_per_word: float, run: str) -> OpenLoop:
    """The load: prompts of about the rows' lengths, unique in this run, answers of exactly their length."""
    return OpenLoop([Arrival(row.arrival_s, _prompt(row, tokens_per_word, f"{run} {n}")) for n, row in enumerate(rows)])


def _prompt(row: Row, tokens_per_word: float, seed: str) -> Prompt:
    words = max(1, round(row.prompt_tokens / tokens_per_word))
    return Prompt(unique_text(words, seed), max_tokens=min(row.output_tokens, MAX_OUTPUT_TOKENS))
