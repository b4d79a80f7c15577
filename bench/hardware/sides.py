"""Prefill and decode engines beside two that do both: the runs of `bench.hardware.pair` as a table.

    python -m bench.hardware.sides DIR

For each run with remote prefill it also gives the core's verdict on the fabric, from what the decode engine counted in
that run and what its own model says of computing the same prompts.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench.hardware import client, gaps
from bench.hardware.keep import complete, requests, runs
from bench.hardware.predict import BUDGET
from bench.hardware.summary import Seen, kept
from plimsoll.core import transfer
from plimsoll.core.forecast import Unknown
from plimsoll.core.latency import StepModel
from plimsoll.core.slo import Slo
from plimsoll.core.workload import from_samples
from plimsoll.sim import profile

WARM_S, WINDOW_S = 4.0, 40.0
TARGETS: Final = ((0.5, 0.05), (0.3, 0.025), (0.2, 0.015), (0.5, 0.01))
GAP: Final = (0.5, 0.05)  # TTFT, and no gap between two tokens longer than this
_COUNTERS: Final = {
    "transfer_s": r"vllm:nixl_xfer_time_seconds_sum",
    "post_s": r"vllm:nixl_post_time_seconds_sum",
    "tokens": r'vllm:prompt_tokens_by_source_total\{.*source="external_kv_transfer"',
    "preempted": r"vllm:num_preemptions_total",
}


def counted(metrics: str) -> dict[str, float]:
    """What a decode engine counted since its start."""
    found = dict.fromkeys(_COUNTERS, 0.0)
    for name, pattern in _COUNTERS.items():
        for line in re.findall(rf"^{pattern}.*$", metrics, re.MULTILINE):
            found[name] += float(line.rsplit(" ", 1)[1])
    return found


def figures(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One run's figures after its warm-up: milliseconds, and shares of what was sent."""
    return judged(client.seen(rows))


def judged(requests: Sequence[Seen]) -> dict[str, Any]:
    """The same of requests that clients or a simulator saw."""
    seen = [one for one in requests if WARM_S <= one.sent_s < WARM_S + WINDOW_S]
    first = [one.ttft_s * 1e3 for one in seen if one.ttft_s is not None]
    each = [one.tpot_s * 1e3 for one in seen if one.tpot_s is not None]
    shares = {f"{a:g}/{b:g}": _share(seen, Slo(0.95, a, 0.0, b)) for a, b in TARGETS}
    even = [one.ok and (one.ttft_s or 9e9) <= GAP[0] and (one.longest_gap_s or 0) <= GAP[1] for one in seen]
    return {
        "rate_rps": len(seen) / WINDOW_S,
        "ok": sum(one.ok for one in seen) / len(seen),
        "ttft_ms": np.percentile(first, (50, 95)).tolist(),
        "tpot_ms": np.percentile(each, (50, 95)).tolist(),
        **shares,
        "gap": float(np.mean(even)),
    }


def _share(seen: Sequence[Seen], slo: Slo) -> float:
    return sum(kept(one, slo) for one in seen) / len(seen)


def verdict(moved: transfer.Moved, rows: Sequence[dict[str, Any]], own: profile.Profile) -> str:
    """The core's words on whether moving these prompts paid, against computing them by the profile's law."""
    law = own.coefficients
    model = StepModel(law.base, law.anypre, law.pretok, law.preattn, law.dec, law.ctx)
    prompts = np.array([row["prompt"] for row in rows], dtype=np.float64)
    workload = from_samples(prompts, np.zeros(prompts.size), np.ones(prompts.size))
    computing = transfer.computing_s(model, workload, BUDGET)
    if isinstance(computing, Unknown):
        return computing.why
    found = transfer.judge(moved, computing)
    return found.why if isinstance(found, Unknown) else f"{'pays' if found.pays else 'does not pay'}: {found.words}"


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.hardware.sides", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--profile", default="h200-8b-cool", help="of the decode engine, for the verdict")
    given = parser.parse_args(words)
    own, before = profile.load(given.profile), dict.fromkeys(_COUNTERS, 0.0)
    for number, path in enumerate(runs(given.folder)):
        rows = complete(path)
        one = figures(rows)
        if number == 0:
            heads = [
                "run",
                "req/s",
                "TTFT p50 / p95 ms",
                "TPOT p50 / p95 ms",
                "ITL p99 ms",
                *(f"{a:g}/{b:g}" for a, b in TARGETS),
                "gap",
            ]
            print("| " + " | ".join(heads) + " |\n|" + "---|" * len(heads))
        pairs = [" / ".join(f"{value:.1f}" for value in one[key]) for key in ("ttft_ms", "tpot_ms")]
        shares = [f"{one[f'{a:g}/{b:g}']:.1%}" for a, b in TARGETS]
        name = path.name.split(".requests.json")[0]
        late = gaps.quantile_s(requests(path).get("gaps", {}), 0.99, WARM_S, WARM_S + WINDOW_S)
        pairs.append("-" if late is None else f"{late * 1e3:.1f}")
        print("| " + " | ".join([name, f"{one['rate_rps']:.1f}", *pairs, *shares, f"{one['gap']:.1%}"]) + " |")
        metrics = given.folder / f"{name}.requests.d.metrics.txt"
        after = counted(metrics.read_text()) if metrics.exists() else before
        change, before = {key: after[key] - before[key] for key in after}, after
        if ".pd." in path.name:
            words_ = verdict(transfer.Moved(change["tokens"], change["transfer_s"], change["post_s"]), rows, own)
            print(f"  {name}: {words_}; {change['preempted']:.0f} preemptions", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
