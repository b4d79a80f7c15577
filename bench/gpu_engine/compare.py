"""Compares vLLM's own defaults with the arguments that `plimsoll plan` recommends for an SLO, under the same requests.

    python -m bench.gpu_engine.compare --hardware h200-8b-launcher --rate 17 --itl-limit 40ms --out DIR

Each engine gets the same open-loop traces, at `--rate` times each of `--load`. Goodput counts requests that were
answered in full within TTFT and TPOT; beside it stands the share of them whose longest gap between two tokens was
within the limit.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from bench.gpu_engine import check
from bench.hardware import client, dummy_models, measure, summary, traces
from plimsoll.cli.main import main as plimsoll
from plimsoll.core.slo import Slo

VLLM_DEFAULTS: Final = ("--max-num-seqs", "1024")  # of `vllm serve` on a GPU of 70 GB or more; the check has 256
PROMPT_TOKENS, OUTPUT_TOKENS = 1190, 220  # means of `traces.chat_lengths`
WARM_S: Final = 5.0


def seconds(text: str) -> float:
    """`500ms` or `1.5s` in seconds. Raises ValueError."""
    return float(text[:-2]) / 1e3 if text.endswith("ms") else float(text.removesuffix("s"))


def recommended_args(given: Namespace) -> tuple[dict[str, Any], list[str]]:
    """The plan's answer, and the engine arguments in it."""
    words = ["plan", "--json", "--hardware", given.hardware, "--rate", str(given.rate), "--gpus-per-replica", "1"]
    words += ["--prompt-tokens", str(PROMPT_TOKENS), "--output-tokens", str(OUTPUT_TOKENS)]
    words += ["--ttft", given.ttft, "--tpot", given.tpot]
    words += ["--itl-limit", given.itl_limit] if given.itl_limit else []
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        plimsoll(words)
    document = json.loads(printed.getvalue())
    tier = document["tiers"]["serve"]
    args = ["--max-num-seqs", str(tier["max_num_seqs"])]
    return document, [*args, "--max-num-batched-tokens", str(tier["max_num_batched_tokens"])]


def judge(rows: Sequence[dict[str, Any]], slo: Slo, limit_s: float | None, window_s: float) -> dict[str, Any]:
    """The requests after the warm-up: goodput, quantiles, and the share whose longest gap is within the limit."""
    observed = [request for request in client.to_observed(rows) if request.sent_s >= WARM_S]
    result = summary.summary(observed, slo, window_s - WARM_S)
    gaps = [request.max_itl_s for request in observed if request.ok and request.max_itl_s is not None]
    result["longest_gap_s"] = max(gaps, default=None)
    if limit_s is not None:
        result["gaps_within_limit"] = sum(gap <= limit_s for gap in gaps) / len(gaps) if gaps else None
    return result


def main(argv: Sequence[str] | None = None) -> int:
    parser = measure.arguments("bench.gpu_engine.compare")
    parser.add_argument("--model", choices=sorted(dummy_models.CONFIGS), default="8b")
    parser.add_argument("--hardware", required=True, metavar="PROFILE", help="of `plimsoll plan`")
    parser.add_argument("--rate", type=float, required=True, metavar="R", help="requests/s that are planned for")
    parser.add_argument("--load", type=float, nargs="+", default=[0.9, 1.05], metavar="X", help="times the rate")
    parser.add_argument("--ttft", default="500ms")
    parser.add_argument("--tpot", default="30ms")
    parser.add_argument("--itl-limit", default="")
    parser.add_argument("--seconds", type=float, default=35.0, help="length of each trace (%(default)s)")
    given = parser.parse_args(argv)
    out: Path = given.out.resolve()
    slo = Slo(0.95, ttft_s=seconds(given.ttft), tpot_s=seconds(given.tpot))
    limit_s = seconds(given.itl_limit) if given.itl_limit else None
    with measure.recording(out) as record:
        plan, args = recommended_args(given)
        record.save("plan", plan)
        record.save("args", args)
        for name, words in (("defaults", list(VLLM_DEFAULTS)), ("plan", args)):
            session = check.Session(out, given.model, given.runtime, given.arg)
            with session.running(name, words) as run:
                if run is None:
                    continue
                for number, factor in enumerate(given.load):
                    trace = out / f"{factor}.csv"
                    traces.write(trace, traces.poisson(given.rate * factor, given.seconds, 40 + number))
                    rows = client.run(
                        trace, run.url, out / f"{name}.{factor}.requests.json", workers=given.workers, seed=60 + number
                    )
                    record.save(f"{name} at {given.rate * factor:.1f}/s", judge(rows, slo, limit_s, given.seconds))
                    measure.wait_idle(run)
    print(json.dumps({key: value for key, value in record.found.items() if " at " in key}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
