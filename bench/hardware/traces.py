"""Traces drawn before any run: one file is both predicted and sent.

Problem: the rate of a short run differs from the nominal rate (20 s of Poisson arrivals at 21/s may bring 19/s), and a
prediction for other requests proves little.

Idea: arrivals and lengths are drawn once, from a seed, and written as a trace in the format that `plimsoll simulate`
reads. The simulator runs it before the measurement, the clients send it in the measurement.
"""

from __future__ import annotations

import csv
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

TRACE_COLUMNS: Final = ("arrival_s", "prompt_tokens", "output_tokens")
Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class PlannedRequest:
    """One request: seconds after the start of its run, and its tokens."""

    at_s: float
    prompt: int
    output: int


def chat_lengths(generator: np.random.Generator, size: int) -> tuple[Counts, Counts]:
    """Prompt and output tokens of a chat: lognormal, means near 1,190 and 220."""
    prompt = np.clip(generator.lognormal(np.log(1000), 0.6, size), 50, 8000)
    output = np.clip(generator.lognormal(np.log(195), 0.5, size), 10, 1000)
    return prompt.astype(np.int64), output.astype(np.int64)


def poisson(rate_per_s: float, seconds: float, seed: int) -> list[PlannedRequest]:
    """Poisson arrivals over `seconds` of which there are as many as the rate says, with the lengths of a chat.

    Given their number, the arrivals of a Poisson process lie uniformly: what is left to chance is when, not how many.
    """
    if not (rate_per_s > 0 and seconds > 0):
        raise ValueError(f"rate and seconds must be above 0, not {rate_per_s} and {seconds}")
    generator = np.random.default_rng(seed)
    return _with_lengths(generator, np.sort(generator.uniform(0, seconds, round(rate_per_s * seconds))))


def gamma_arrivals(rate_per_s: float, seconds: float, gap_cv2: float, seed: int) -> list[PlannedRequest]:
    """The same with gamma gaps of the squared coefficient of variation `gap_cv2`; above 1 arrivals bunch."""
    if not (rate_per_s > 0 and seconds > 0 and gap_cv2 > 0):
        raise ValueError(f"rate, seconds and gap_cv2 must be above 0, not {rate_per_s}, {seconds} and {gap_cv2}")
    generator = np.random.default_rng(seed)
    size = round(rate_per_s * seconds)
    gaps = generator.gamma(1.0 / gap_cv2, size=size + 1)
    return _with_lengths(generator, seconds * np.cumsum(gaps[:size]) / gaps.sum())


def _with_lengths(generator: np.random.Generator, arrivals: npt.NDArray[np.float64]) -> list[PlannedRequest]:
    prompt, output = chat_lengths(generator, arrivals.size)
    rows = zip(arrivals.tolist(), prompt.tolist(), output.tolist(), strict=True)
    return [PlannedRequest(round(at, 6), p, o) for at, p, o in rows]


def write(path: Path, requests: list[PlannedRequest]) -> None:
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(TRACE_COLUMNS)
        rows.writerows((one.at_s, one.prompt, one.output) for one in requests)


def read(path: Path) -> list[PlannedRequest]:
    with path.open(newline="") as file:
        return [
            PlannedRequest(float(row[TRACE_COLUMNS[0]]), int(row[TRACE_COLUMNS[1]]), int(row[TRACE_COLUMNS[2]]))
            for row in csv.DictReader(file)
        ]


def digest(path: Path) -> str:
    """By which a prediction names the trace that it is of."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def find_trace(path: Path, prediction: str) -> list[PlannedRequest]:
    """The trace of this digest; raises ValueError for another one."""
    if digest(path) != prediction:
        raise ValueError(f"{path} is not the trace that was predicted")
    return read(path)
