"""Makes windows.csv and runs.csv from step logs: `aggregate.py FOLDER`.

FOLDER holds sweep.csv, steps_SERVER.csv.gz (one line per engine step) and RUN.req.csv.gz (one line per request).
A second's busy time is the sum of the steps that ended in it, each from the end of the one before or, after an idle
gap, from its own start. The first four seconds of a run, in which its batch grows, are left out.
"""

from __future__ import annotations

import csv
import gzip
import sys
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
SERVERS = {"8b_": "8b", "70b_": "70b", "8b-mixed_": "8b-mixed"}
CACHED = {"8b_mixed_b2048", "8b_mixed_b8192"}  # every prompt was in the prefix cache
WINDOW = ["run", "second", "busy_s", "steps", "prefill_steps", "prompt_tokens", "prefill_pairs"]
WINDOW += ["output_tokens", "cached_tokens_read", "mean_running"]
RUN = ["run", "server", "mix", "budget_tokens", "asked_rps", "step_mean_s", "tpot_p50_s", "tpot_mean_s"]
RUN += ["chunk_tokens", "prefill_context_tokens", "decode_context_tokens"]


def table(path: Path) -> Any:
    with gzip.open(path, "rt") as lines:
        return np.genfromtxt(lines, delimiter=",", names=True, dtype=None, encoding=None)


def seconds(name: str, log: Any, start_s: float, end_s: float) -> list[list[str]]:
    before = np.r_[-1.0, log["t_out"][:-1]]
    busy = log["t_out"] - np.maximum(before, log["t_sched"])
    rows = []
    for second in range(4, int(end_s - start_s)):
        inside = (log["t_out"] > start_s + second) & (log["t_out"] <= start_s + second + 1)
        steps = log[inside]
        if (log["t_sched"] >= before)[inside].any():
            continue  # idle for a moment
        sums = [int(steps[column].sum()) for column in ("pretok", "preattn", "outtok", "decctx")]
        prefill_steps = int((steps["npre"] > 0).sum())
        numbers = [f"{busy[inside].sum():.6f}", len(steps), prefill_steps, *sums, f"{steps['run'].mean():.2f}"]
        rows.append([name, str(second), *map(str, numbers)])
    return rows


def lengths(requests: Any, budget: int, cached: bool) -> list[float]:
    prompt, output = requests["prompt"].astype(float), requests["out"].astype(float)
    decode = (output * (prompt + output / 2)).sum() / output.sum()
    if cached:  # what is left is the rest of the last block of 16 tokens
        return [8.0, prompt.mean(), decode]
    return [prompt.sum() / np.ceil(prompt / budget).sum(), (prompt**2 / 2).sum() / prompt.sum(), decode]


def main(folder: Path) -> None:
    logs = {server: table(folder / f"steps_{server}.csv.gz") for server in SERVERS.values()}
    windows, runs = [], []
    with (folder / "sweep.csv").open() as lines:
        sweep = list(csv.DictReader(lines))
    for row in sweep:
        requests = table(folder / f"{row['run']}.req.csv.gz")
        requests = requests[requests["rate"] == float(row["asked_rps"])]
        name = f"{row['run']}@{float(row['asked_rps']):g}"
        of_run = seconds(name, logs[row["server"]], requests["t0"].min(), requests["t0"].max())
        windows += of_run
        step_s = sum(float(w[2]) for w in of_run) / sum(int(w[3]) for w in of_run)
        tpot = requests["tpot"][requests["ok"] == 1]
        mix = "cached" if row["run"] in CACHED else requests["mix"][0]
        numbers = [step_s, np.median(tpot), tpot.mean(), *lengths(requests, int(row["budget"]), mix == "cached")]
        runs.append([name, row["server"], mix, row["budget"], row["asked_rps"], *(f"{n:.6g}" for n in numbers)])
    for path, head, rows in (("windows.csv", WINDOW, windows), ("runs.csv", RUN, runs)):
        with (HERE / path).open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([head, *rows])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
