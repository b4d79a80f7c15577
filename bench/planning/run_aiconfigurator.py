"""`python bench/planning/run_aiconfigurator.py FILE`: results of AIConfigurator's packaged tables, case by case.

Needs `pip install aiconfigurator==0.12.0 aiconfigurator-core==0.12.0` in an environment of its own, and nothing of this
project: `data/aiconfigurator.json` is its output, so that the comparison itself needs only that file.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

GPUS = 8
# Model, system, mean prompt and output tokens, TTFT and TPOT in ms.
CASES = (
    ("Qwen/Qwen3-8B", "h200_sxm", 2048, 256, 500, 30),
    ("Qwen/Qwen3-8B", "h200_sxm", 1200, 220, 500, 50),
    ("Qwen/Qwen3-8B", "h200_sxm", 4000, 100, 500, 50),
    ("meta-llama/Meta-Llama-3.1-8B", "h200_sxm", 3000, 300, 200, 10),
    ("Qwen/Qwen3-32B", "h200_sxm", 2048, 256, 1000, 40),
    ("Qwen/Qwen3-32B", "h200_sxm", 4000, 1000, 2000, 30),
    ("Qwen/Qwen3-32B", "h100_sxm", 4000, 1000, 3000, 100),
    ("meta-llama/Meta-Llama-3.1-70B", "h200_sxm", 2048, 256, 2000, 50),
    ("Qwen/Qwen3-30B-A3B", "h200_sxm", 2048, 256, 500, 20),
)
AGGREGATED = ("seq/s/gpu", "ttft", "tpot", "bs", "tp")
PAIR = ("seq/s/gpu", "ttft", "tpot", "(p)workers", "(p)bs", "(p)tp", "(d)workers", "(d)bs", "(d)tp")


def ask(model: str, system: str, prompt: int, output: int, ttft_ms: int, tpot_ms: int) -> dict[str, Any]:
    """The best aggregated and the best disaggregated configuration of GPUS."""
    from aiconfigurator.cli.api import cli_default

    result = cli_default(
        model, GPUS, system, backend="vllm", isl=prompt, osl=output, ttft=float(ttft_ms), tpot=float(tpot_ms)
    )
    recommendation: dict[str, Any] = {
        "model": model, "system": system, "prompt": prompt, "output": output, "ttft_ms": ttft_ms, "tpot_ms": tpot_ms,
        "chosen": result.chosen_exp,
    }  # fmt: skip
    for name, columns in (("agg", AGGREGATED), ("disagg", PAIR)):
        table = result.best_configs.get(name)
        row = None if table is None or table.empty else table.iloc[0].to_dict()
        recommendation[name] = None if row is None else {key: _to_json(row[key]) for key in columns if key in row}
        if row is not None:
            recommendation["backend"] = f"vLLM {row.get('version', row.get('(p)version'))}"
    return recommendation


def _to_json(value: Any) -> float:
    return round(float(value), 3)


def main(path: str) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    results = []
    for case in CASES:
        try:
            results.append(ask(*case))
        except Exception as error:  # noqa: BLE001  the tool's own refusal is an answer too
            results.append({"model": case[0], "system": case[1], "refused": str(error)[:200]})
        print(json.dumps(results[-1]), flush=True)
    Path(path).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
