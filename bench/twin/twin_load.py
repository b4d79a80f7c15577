"""What a twin is sent, and what comes back in the accelerator's time."""

from __future__ import annotations

import csv
import gzip
import io
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from bench.hardware import client
from plimsoll.sim.profile import HardwareProfile
from plimsoll.sim.profiles import StepCoefficients

COLUMNS: Final = ("run", "at_s", "prompt", "output", "ttft_s", "tpot_s", "ok")
_LENGTHS: Final = (200, 2000)
_REPEATS: Final = 9
_TOKENS: Final = 4
_SEED: Final = 1_000_003  # of these prompts; no load's is as large

Row = Mapping[str, Any]


def unloaded_prefill_s(coefficients: StepCoefficients, prompt: int) -> float:
    """The step of a cool card that reads one prompt and nothing else, seconds."""
    return (
        coefficients.base
        + coefficients.anypre
        + coefficients.pretok * prompt
        + coefficients.preattn * prompt * prompt / 2
    )


async def frontend_overhead(url: str, profile: HardwareProfile, scale: float) -> tuple[float, float]:
    """What vLLM takes outside its steps on this machine, for a request and for each token of a prompt, in seconds of
    the accelerator: medians of single requests less the step, on a line through two lengths."""
    overheads = []
    async with client.session() as http:
        await client.send_streamed(http, url, client.request_body(client.prompt((_SEED,), 64), _TOKENS, stream=True))
        for length in _LENGTHS:
            body = [client.prompt((_SEED, length, number + 1), length) for number in range(_REPEATS)]
            results = [
                await client.send_streamed(http, url, client.request_body(lengths_s, _TOKENS, stream=True))
                for lengths_s in body
            ]
            ttft_s = statistics.median(result["first_s"] for result in results)
            overheads.append(ttft_s / scale - unloaded_prefill_s(profile.coefficients, length))
    return fit_line(overheads)


def fit_line(overheads: Sequence[float]) -> tuple[float, float]:
    """Intercept and slope through the two lengths; neither is below 0."""
    slope = max(0.0, (overheads[1] - overheads[0]) / (_LENGTHS[1] - _LENGTHS[0]))
    return max(0.0, overheads[0] - slope * _LENGTHS[0]), slope


def record_lines(run: str, rows: Sequence[Row], scale: float) -> list[tuple[str | int, ...]]:
    """The clients' rows as lines of the record, from the first sending on; times as they were, divided by the scale."""
    sent_rows = sorted(rows, key=lambda row: row["at_s"] + row["late_s"])
    begin_s = sent_rows[0]["at_s"] + sent_rows[0]["late_s"]
    return [_record_line(run, row, (row["at_s"] + row["late_s"] - begin_s) / scale, scale) for row in sent_rows]


def _record_line(run: str, row: Row, at_s: float, scale: float) -> tuple[str | int, ...]:
    first_s, last_s, output = row["first_s"], row["last_s"], row["output"]
    ttft = "" if first_s is None else f"{first_s / scale:.5f}"
    tpot = f"{(last_s - first_s) / scale / (output - 1):.6f}" if row["ok"] and output > 1 else ""
    return run, f"{at_s:.5f}", row["prompt"], output, ttft, tpot, int(row["ok"])


def write(path: Path, lines: Sequence[Sequence[object]]) -> None:
    """A compressed table; the same lines make the same bytes."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(COLUMNS)
    table.writerows(lines)
    with path.open("wb") as compressed, gzip.GzipFile("", "wb", 9, compressed, 0) as file:
        file.write(text.getvalue().encode())
