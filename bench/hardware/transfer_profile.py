"""Converts a profile measured on one GPU to another GPU.

    python -m bench.hardware.transfer_profile PROFILE.json 8b --gpu H100-SXM --out FILE

Problem: for a new GPU there is its data sheet, or a profile of another GPU. Which one predicts better?

Idea: each coefficient of the measured model, cool and hot, times the ratio of the two data sheets' priors of that
coefficient. Other parameters of the profile stay; the cache is the data sheet's. The result is a profile for
`--profile` of the predictions.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.hardware import dummy_models, predict
from plimsoll.core.engine_model import self_benchmark


def transfer(measured: Mapping[str, Any], model: str, card: str) -> dict[str, Any]:
    """The profile as it should be on `card`. Raises ValueError where the measured one's card is in no table."""
    source_card = self_benchmark.find_accelerator(measured["accelerator"])
    if source_card is None:
        raise ValueError(f"no figures of {measured['accelerator']!r}")
    source_prior, target_prior = (predict.from_prior(model, name)[1] for name in (source_card.name, card))

    def scaled(coefficients: Mapping[str, float]) -> dict[str, float]:
        return {
            name: _scale(coefficients[name], source_prior[name], target_prior[name]) for name in predict.COEFFICIENTS
        }

    hot = {"hot": scaled(measured["hot"])} if "hot" in measured else {}
    return {**measured, **scaled(measured), **hot, "accelerator": card, "kv_tokens": target_prior["kv_tokens"]}


def _scale(measured: float, before: float, after: float) -> float:
    """A coefficient for which there is no prior stays as it is."""
    return float(f"{measured * after / before:.6g}") if before else measured


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.hardware.transfer_profile", description=__doc__)
    parser.add_argument("profile", type=Path)
    parser.add_argument("model", choices=sorted(dummy_models.CONFIGS))
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    predict.add_gpu_argument(parser)
    given = parser.parse_args(words)
    found = transfer(json.loads(given.profile.read_text()), given.model, given.gpu)
    given.out.write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
