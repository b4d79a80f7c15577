"""The demo's input: slices of two real traces, cut to loads that a fleet and two cores can carry.

Problem: ten minutes of real arrivals must hold a quiet time, a step in each tier's load and a constant time, on engines
at a GPU's pace, and again on real engines that are a hundred times slower.
Idea: a rate is changed by laying stretches over each other or leaving requests out (`traces/README.md`), lengths never.
The fleet sees all of it at time scale 1; the real engines see every n-th fitting request, five times as fast as it was.
"""

from __future__ import annotations

import csv
import gzip
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).with_name("traces")
CODE, CHAT = "code", "chat"
CREDIT: Final = (
    "Azure LLM inference trace 2023, code (Azure/AzurePublicDataset, Microsoft, CC-BY-4.0; stretches laid over each "
    "other, requests left out), and LMSYS Chatbot Arena arrivals (Ying1123/VTC-artifact, Apache-2.0; scaled by its "
    "authors): e2e/demo/traces/README.md."
)

REAL_ARRIVALS_S: Final = 480.0  # real arrivals, then
CONSTANT_S: Final = 120.0  # requests of the next minutes, evenly spaced
CONSTANT_CHAT_EVERY: Final = 2  # of the questions: all of them take up to 0.85 of one decode engine, too near a second
STEP: Final = (120.0, 280.0)  # more code: the prefill tier's step
WAVE: Final = (240.0, 400.0)  # more chat: the decode tier's step
WAVE_COPIES: Final = 1  # beside the first one
WAVE_SHIFT_S: Final = 200.0
ARENA_S: Final = 600.0
KILL_S: Final = 430.0
LENGTH_S: Final = REAL_ARRIVALS_S + CONSTANT_S

ENGINES_TIME_SCALE: Final = 5.0  # the real engines' run: times are divided by it
ENGINES_SAMPLE_EVERY: Final = 40
CONTEXT_TOKENS: Final = 3900  # below the demo engine's --max-model-len, with room for the chat template
MIN_PROMPT_TOKENS: Final = 256  # two blocks: a prompt that fills none is read where it is decoded
MAX_OUTPUT_TOKENS: Final = 64


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a load: seconds after its start, tokens in and out, and who asks."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    request_class: str = CODE
    tenant: str = ""


def code_requests(layers: Iterable[int] = (0, 1)) -> list[TraceRequest]:
    """The coding assistant's requests of these layers."""
    layer_set = set(layers)
    return [_to_request(row, CODE, "copilot") for row in _rows("azure_code") if int(row["layer"]) in layer_set]


def chat_requests() -> list[TraceRequest]:
    """The arena's requests."""
    return [_to_request(row, CHAT, f"arena-{row['tenant']}") for row in _rows("arena_chat")]


def _rows(name: str) -> Iterable[dict[str, str]]:
    with gzip.open(FOLDER / f"{name}.csv.gz", "rt", encoding="ascii") as lines:
        yield from csv.DictReader(lines)


def _to_request(row: dict[str, str], request_class: str, tenant: str) -> TraceRequest:
    return TraceRequest(
        float(row["arrival_s"]), int(row["prompt_tokens"]), int(row["output_tokens"]), request_class, tenant
    )


def clip(rows: Iterable[TraceRequest], begin_s: float, end_s: float) -> list[TraceRequest]:
    """Those of [begin, end), at their own moments."""
    return [row for row in rows if begin_s <= row.at_s < end_s]


def shift_cyclic(rows: Iterable[TraceRequest], by_s: float, period_s: float) -> list[TraceRequest]:
    """All of them, so many seconds later, those beyond the period at its begin."""
    result = (replace(row, at_s=(row.at_s + by_s) % period_s) for row in rows)
    return sorted(result, key=lambda row: row.at_s)


def spread_evenly(rows: Sequence[TraceRequest], begin_s: float, end_s: float) -> list[TraceRequest]:
    """The same requests in the same order, spread evenly over [begin, end)."""
    gap_s = (end_s - begin_s) / max(1, len(rows))
    return [replace(row, at_s=begin_s + (n + 0.5) * gap_s) for n, row in enumerate(rows)]


def fleet_load() -> list[TraceRequest]:
    """What the fleet of light engines is asked: real arrivals, then the constant time."""
    steps, chat_rows = code_requests(), chat_requests()
    waves = [
        row for n in range(WAVE_COPIES) for row in clip(shift_cyclic(chat_rows, (n + 1) * WAVE_SHIFT_S, ARENA_S), *WAVE)
    ]
    real_arrivals = clip(steps, 0.0, REAL_ARRIVALS_S) + clip(chat_rows, 0.0, REAL_ARRIVALS_S) + waves
    last_code = clip(steps, REAL_ARRIVALS_S, LENGTH_S)
    last_chat = clip(chat_rows, ARENA_S - CONSTANT_S, ARENA_S)[::CONSTANT_CHAT_EVERY]
    constant = spread_evenly(last_code, REAL_ARRIVALS_S, LENGTH_S) + spread_evenly(last_chat, REAL_ARRIVALS_S, LENGTH_S)
    return sorted(real_arrivals + constant, key=lambda row: row.at_s)


def engines_load(
    scale: float = ENGINES_TIME_SCALE, every: int = ENGINES_SAMPLE_EVERY, limit_tokens: int = CONTEXT_TOKENS
) -> list[TraceRequest]:
    """What the real engines are asked: every n-th fitting request of the code's arrivals, `scale` times as fast."""
    rows = clip(code_requests(), 0.0, REAL_ARRIVALS_S)
    return sample_rows(rows, scale, every, limit_tokens)


def sample_rows(rows: Iterable[TraceRequest], scale: float, every: int, limit_tokens: int) -> list[TraceRequest]:
    """Every n-th of the rows that fit into the context and fill two blocks; times divided by `scale`, short answers."""
    eligible = (
        r for r in rows if r.prompt_tokens >= MIN_PROMPT_TOKENS and r.prompt_tokens + r.output_tokens <= limit_tokens
    )
    selected = list(eligible)[::every]
    return [replace(r, at_s=r.at_s / scale, output_tokens=min(r.output_tokens, MAX_OUTPUT_TOKENS)) for r in selected]
