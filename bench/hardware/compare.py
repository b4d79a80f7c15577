"""Prediction and measurement side by side, as the tables of docs/hardware.md.

    python -m bench.hardware.compare PREDICTION_DIR MEASURED_DIR [--json FILE]

PREDICTION_DIR is what `bench.hardware.predict` wrote before the run, MEASURED_DIR what `bench.hardware.measure` did. A
trace that is not the one that was predicted is refused.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.hardware import client, traces
from bench.hardware.keep import complete, runs
from bench.hardware.summary import milliseconds, shown, summary
from plimsoll.core.slo import Slo


def measured(prediction: Path, folder: Path) -> list[dict[str, Any]]:
    """The clients' figures of each run, in the order of the prediction.

    Raises ValueError for another trace, and where a request of it has no row or a client ended badly.
    """
    told = json.loads((prediction / "prediction.json").read_text())
    slo, found = Slo(**told["slo"]), []
    for name, digest in sorted(told["traces"].items()):
        sent = traces.predicted(prediction / name, digest)
        seen = next((path for path in runs(folder) if path.name.startswith(f"{Path(name).stem}.")), None)
        if seen is None:  # the measurement was cut short
            break
        rows = complete(seen, len(sent))
        after = [one for one in client.seen(rows) if one.sent_s >= told["warm_s"]]
        found.append(summary(after, slo, told["window_s"]))
    return found


def table(told: dict[str, Any], found: Sequence[dict[str, Any]]) -> list[str]:
    """Markdown: a row for each rate, measured first, then each source's simulator and closed form."""
    sources = list(told["from"])
    head = ["share of line", "req/s", "in promise", "TTFT p50 / p95", "TPOT p50 / p95"]
    for source in sources:
        head += [f"{source}: in promise", "TTFT p50 / p95", "TPOT p50 / p95", "closed form: in promise, TPOT p95"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for number, one in enumerate(found):
        row = [f"{told['shares_of_line'][number]:.0%}", f"{one['rate_rps']:.1f}", *_cells(one)]
        for source in sources:
            said = told["from"][source]["rates"][number]
            tpot = said["core"]["p95_tpot_s"]
            closed = f"{said['core']['in_promise']:.1%}, {milliseconds(tpot)}"
            row += [*_cells(said["simulator"]), closed]
        lines.append("| " + " | ".join(row) + " |")
    return lines


def _cells(one: dict[str, Any]) -> list[str]:
    return [f"{one['in_promise']:.1%}", shown(one["ttft_s"]), shown(one["tpot_s"])]


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.hardware.compare", description=__doc__)
    parser.add_argument("prediction", type=Path)
    parser.add_argument("measured", type=Path)
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args(words)
    told = json.loads((given.prediction / "prediction.json").read_text())
    found = measured(given.prediction, given.measured)
    print("\n".join(table(told, found)))
    if given.json is not None:
        given.json.write_text(json.dumps({"prediction": told, "measured": found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
