"""What the core makes of a warm engine's own ladder, beside the data sheet and the law that was fitted to its steps.

The steps themselves too: medians of those that only decode, by sequences, and of those with prompts, by their tokens;
how long all of them took over what the data sheet says; and the first token of prompts alone.

python -m bench.hardware.self_benchmarks DIR    (what `bench.hardware.measure` wrote)
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np

from bench.hardware import fit_step_model
from plimsoll.core.engine_model import roofline, self_benchmark
from plimsoll.core.engine_model.step_time import StepModel
from plimsoll.core.ports import SelfBenchmark

_DECODE_SIZES: Final = (1, 4, 8, 16, 32, 64, 128, 192, 256)
_PREFILL_TOKENS: Final = (1, 256, 512, 768, 1024, 2048, 4096, 8193)
_SHORT: Final = 700.0  # tokens of context a sequence
_MIN_STEPS: Final = 20  # steps of which a median is shown


def prior_models(folder: Path) -> dict[str, StepModel]:
    """Step models without a step log, by source: the data sheet's prior, and the self-benchmark's."""
    engine_info = json.loads((folder / "result.json").read_text())["about"]
    shape = roofline.model_shape(engine_info["config"])
    gpu = self_benchmark.find_accelerator(engine_info["accelerator"]["name"])
    models: dict[str, StepModel] = {}
    if gpu is not None:
        models["data sheet"] = roofline.prior(shape, gpu)
    if points := engine_info["self_benchmark"]:  # an engine that ran out of time for it has none
        prior = SelfBenchmark(tuple(map(tuple, points["prefill"])), tuple(map(tuple, points["decode"])))
        models["self_benchmark"] = self_benchmark.fit_step_model(prior, engine_info["limits"]["token_budget"])
    return models


def step_models(folder: Path, min_sequences: int) -> dict[str, StepModel]:
    """The priors, and the laws fitted to steps of at least so many sequences, by source.

    A law that is no step model, since its prompts have less than no cost, is left out.
    """
    models, log = prior_models(folder), next(folder.glob("engine.steps.csv*"))
    for record in fit_step_model.fit(folder, log, min_sequences):
        fitted_model = record["law"]
        with contextlib.suppress(ValueError):
            models[f"steps, {record['set']}"] = StepModel(*(fitted_model[name] for name in fit_step_model.COEFFICIENTS))
    return models


def time_ratio(folder: Path, min_sequences: int, model: StepModel) -> float:
    """Seconds of all steps in blocks of at least so many sequences, over what a law says of the same steps."""
    rows, seconds, _, sequences = fit_step_model.step_blocks(
        fit_step_model.read_steps(next(folder.glob("engine.steps.csv*")))
    )
    included = sequences >= min_sequences
    return float(seconds[included].sum() / (rows[included] @ np.array(list(asdict(model).values()))).sum())


def unloaded_ttft_ms(folder: Path) -> list[str]:
    """Milliseconds to the first token of a prompt alone, by its tokens; empty where none was measured."""
    ttft_by_length = json.loads((folder / "result.json").read_text()).get("alone", [])
    if not ttft_by_length:
        return []
    lines = [
        "| prompt alone | " + " | ".join(str(record["prompt"]) for record in ttft_by_length) + " |",
        "|" + "---|" * (len(ttft_by_length) + 1),
    ]
    return [*lines, "| ms | " + " | ".join(f"{record['ttft_s'] * 1e3:.1f}" for record in ttft_by_length) + " |"]


def step_medians_ms(log: dict[str, fit_step_model.Floats]) -> list[str]:
    """Milliseconds of steps that follow another without a pause."""
    before = np.concatenate(([-np.inf], log["t_out"][:-1]))
    step_s = (log["t_out"] - np.maximum(before, log["t_sched"])) * 1e3
    busy = log["t_sched"] < before
    is_back_to_back = busy & (log["npre"] == 0) & (np.concatenate(([1], log["npre"][:-1])) == 0)
    short = log["decctx"] <= _SHORT * np.maximum(log["ndec"], 1)
    decode = [(size, is_back_to_back & short & (log["ndec"] == size)) for size in _DECODE_SIZES]
    prompts = [
        ((low, high), busy & (log["pretok"] >= low) & (log["pretok"] < high)) for low, high in pairwise(_PREFILL_TOKENS)
    ]
    lines = []
    for head, selected in (("sequences, decode only", decode), ("prompt tokens", prompts)):
        medians_by_size = [
            (name, float(np.median(step_s[which]))) for name, which in selected if which.sum() >= _MIN_STEPS
        ]
        lines.append(f"| {head} | " + " | ".join(str(name) for name, _ in medians_by_size) + " |")
        lines += [
            "|" + "---|" * (len(medians_by_size) + 1),
            "| ms | " + " | ".join(f"{ms:.1f}" for _, ms in medians_by_size) + " |",
            "",
        ]
    return lines


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.hardware.self_benchmarks", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--from-sequences", type=int, default=0, metavar="N")
    given = parser.parse_args(words)
    models = step_models(given.folder, given.from_sequences)
    names = list(asdict(next(iter(models.values()))))
    print("| source | " + " | ".join(names) + " |\n|" + "---|" * (len(names) + 1))
    for source, model in models.items():
        print(f"| {source} | " + " | ".join(f"{value:.3g}" for value in asdict(model).values()) + " |")
    if "data sheet" in models:
        share = time_ratio(given.folder, given.from_sequences, models["data sheet"])
        print(f"\nsteps took {share:.3f} of what the data sheet says")
    print("\n" + "\n".join(unloaded_ttft_ms(given.folder)))
    print("\n" + "\n".join(step_medians_ms(fit_step_model.read_steps(next(given.folder.glob("engine.steps.csv*"))))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
