"""Fits the step model to an engine's step log: six coefficients, of all steps and of a cool and a hot GPU separately.

    python -m bench.hardware.fit_step_model DIR [--profile FILE]

Problem: the end of a step is recorded late while the next one is being launched, so time shifts between neighbouring
steps; and a GPU at its power limit is slower than a cool one.

Idea: sums over blocks of eight steps without a pause, errors relative to each block's time, plain least squares,
reweighted a few times so that disturbed blocks have little weight. nvidia-smi's clock shows which blocks were cool and
which hot. The residuals are printed: the model's error over blocks, by the number of decoding sequences.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from plimsoll.core.engine_model import roofline

Floats = npt.NDArray[np.float64]

COEFFICIENTS: Final = ("base", "anypre", "pretok", "preattn", "dec", "ctx")
STEPS_PER_BLOCK: Final = 8
COOL_MHZ, HOT_MHZ = 1900.0, 1600.0
_MIN_BLOCKS: Final = 150  # blocks for coefficients of their own
_ROUNDS: Final = 6
_MAX_RELATIVE_ERROR: Final = 0.06  # relative error at which a block weighs half


def read_steps(path: Path) -> dict[str, Floats]:
    """The columns of a step log, plain or gzipped."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        names = file.readline().strip().split(",")
        rows = [line.rstrip("\n").split(",") for line in file]
    table = np.array([[float(cell) for cell in row] for row in rows if len(row) == len(names)], dtype=np.float64)
    return {name: table[:, number] for number, name in enumerate(names)}


def step_blocks(log: dict[str, Floats]) -> tuple[Floats, Floats, Floats, Floats]:
    """Rows of the law (n, 6), their seconds, mid times, mean sequences: of eight steps in a row without a pause.

    A step takes from the end of the one before it, or from its own composition if that was later: then it came after a
    pause, and begins a new run.
    """
    before = np.concatenate(([-np.inf], log["t_out"][:-1]))
    step_s = log["t_out"] - np.maximum(before, log["t_sched"])
    busy = log["t_sched"] < before
    design = np.column_stack(
        (np.ones_like(step_s), log["npre"] > 0, log["pretok"], log["preattn"], log["ndec"], log["decctx"])
    )
    runs = np.cumsum(~busy)
    starts = []
    for run in np.unique(runs):
        block_slice = np.flatnonzero((runs == run) & busy)
        starts += [block_slice[at] for at in range(0, block_slice.size - STEPS_PER_BLOCK + 1, STEPS_PER_BLOCK)]
    first = np.array(starts, dtype=np.intp)
    if first.size == 0:
        raise ValueError(f"no {STEPS_PER_BLOCK} steps follow each other without a pause")
    members = first[:, None] + np.arange(STEPS_PER_BLOCK)
    middle, sequences = log["t_out"][members].mean(axis=1), design[members, COEFFICIENTS.index("dec")].mean(axis=1)
    return design[members].sum(axis=1), step_s[members].sum(axis=1), middle, sequences


def fit_coefficients(rows: Floats, seconds: Floats) -> Floats:
    """Coefficients that make the least relative error, all but `anypre` at least 0."""
    scale = np.maximum(rows.max(axis=0), 1e-300)
    relative, weights = rows / scale / seconds[:, None], np.ones_like(seconds)
    active = np.ones(len(COEFFICIENTS), dtype=np.bool_)
    solution = np.zeros(len(COEFFICIENTS))
    for _ in range(_ROUNDS):
        root_weights = np.sqrt(weights)
        while True:
            part, *_ = np.linalg.lstsq(relative[:, active] * root_weights[:, None], root_weights, rcond=None)
            solution = np.zeros(len(COEFFICIENTS))
            solution[active] = part
            negative = (solution < 0) & (np.arange(len(COEFFICIENTS)) != COEFFICIENTS.index("anypre"))
            if not negative.any():
                break
            active &= ~negative
        error = relative @ solution - 1
        weights = 1 / (1 + (error / _MAX_RELATIVE_ERROR) ** 2)
    return np.asarray(solution / scale)


def sm_clocks(folder: Path, at_s: Floats) -> Floats | None:
    """The SM clock in MHz at each of the times, from nvidia-smi's record; None without one."""
    path = folder / "gpu.csv"
    if not path.exists() or path.stat().st_size == 0:
        return None
    clock = json.loads((folder / "clock.json").read_text())
    times, mhz = [], []
    with path.open(newline="") as file:
        for row in csv.reader(file, skipinitialspace=True):
            if row and row[0][:2] == "20" and len(row) > 2 and row[1] == "0":
                wall_offset = datetime.strptime(row[0], "%Y/%m/%d %H:%M:%S.%f").replace(tzinfo=UTC).timestamp()
                times.append(wall_offset - clock["wall_s"] + clock["monotonic_s"])
                mhz.append(float(row[2]))
    return np.interp(at_s, times, mhz) if times else None


def report(name: str, rows: Floats, seconds: Floats, sequences: Floats, coefficients: Floats) -> dict[str, Any]:
    """The law's error over the blocks, in all and by sequences."""
    error = rows @ coefficients / seconds - 1
    bands = {}
    for low, high in ((0, 1), (1, 8), (8, 32), (32, 64), (64, 128), (128, 192), (192, 1e9)):
        in_band = (sequences >= low) & (sequences < high)
        if in_band.any():
            bands[f"{low}-{high:g}"] = [int(in_band.sum()), float(np.median(error[in_band]))]
    size = np.abs(error)
    return {
        "set": name,
        "blocks": int(seconds.size),
        "mean_error": float(size.mean()),
        "p95_error": float(np.percentile(size, 95)),
        "median_error_by_sequences": bands,
        "law": dict(zip(COEFFICIENTS, coefficients.tolist(), strict=True)),
    }


def fit(folder: Path, log: Path, min_sequences: int = 0) -> list[dict[str, Any]]:
    """Return the pooled step model, and those of a cool and of a hot GPU if either has enough steps.

    min_sequences: fewest mean decoding sequences of a counted block. A mixture of experts reads more experts with each
    sequence up to a few dozen, which the linear model does not express.
    """
    rows, seconds, at_s, sequences = step_blocks(read_steps(log))
    inside = sequences >= min_sequences
    rows, seconds, at_s, sequences = rows[inside], seconds[inside], at_s[inside], sequences[inside]
    models = [report("pooled", rows, seconds, sequences, fit_coefficients(rows, seconds))]
    mhz = sm_clocks(folder, at_s)
    if mhz is not None:
        for name, inside in (("cool", mhz >= COOL_MHZ), ("hot", mhz < HOT_MHZ)):
            if inside.sum() >= _MIN_BLOCKS:
                in_range = rows[inside], seconds[inside]
                models.append(report(name, *in_range, sequences[inside], fit_coefficients(*in_range)))
    return models


def profile_document(folder: Path, models: Sequence[dict[str, Any]], kv_bytes: int, layers: int) -> dict[str, Any]:
    """A hardware profile as the simulator and the light engine read it: cool and hot laws, else the pooled one."""
    sets = {
        coefficients["set"]: {key: float(f"{value:.6g}") for key, value in coefficients["law"].items()}
        for coefficients in models
    }
    engine_info = json.loads((folder / "result.json").read_text())["about"]
    limits = engine_info["limits"]
    return {
        "accelerator": engine_info["accelerator"]["name"],
        **({"mixture": True} if roofline.model_shape(engine_info["config"]).experts > 1 else {}),
        **(sets["cool"] if {"cool", "hot"} <= set(sets) else sets["pooled"]),
        **({"hot": sets["hot"]} if {"cool", "hot"} <= set(sets) else {}),
        "kv_tokens": limits["kv_tokens"],
        "max_num_seqs": limits["max_sequences"],
        "budget": limits["token_budget"],
        "block_size": limits["block_tokens"],
        "layers": layers,
        "max_model_len": limits["max_model_len"],
        "kv_bytes_per_token": kv_bytes,
        "frontend": 0.003,
        "frontend_token": 6.3e-07,
    }


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.hardware.fit_step_model", description=__doc__)
    parser.add_argument("folder", type=Path, help="what `bench.hardware.measure` wrote")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="write a hardware profile")
    parser.add_argument("--from-sequences", type=int, default=0, metavar="N", help="count blocks of as many only")
    given = parser.parse_args(words)
    logs = [path for path in (given.folder / f"engine.steps.csv{end}" for end in ("", ".gz")) if path.exists()]
    models = fit(given.folder, logs[0], given.from_sequences)
    print(json.dumps(models, indent=1))
    if given.profile is not None:
        config = json.loads((given.folder / "result.json").read_text())["about"]["config"]
        heads, size = config["num_key_value_heads"], config["head_dim"]
        layers = config["num_hidden_layers"]
        models_by_log = profile_document(given.folder, models, 2 * layers * heads * size * 2, layers)
        given.profile.write_text(json.dumps(models_by_log, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
