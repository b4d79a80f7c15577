"""Prediction and measurement side by side, as the tables of docs/evaluation/hardware.md.

    python -m bench.hardware.compare PREDICTION_DIR MEASURED_DIR [--json FILE]

PREDICTION_DIR is the output of `bench.hardware.predict` from before the run, MEASURED_DIR that of
`bench.hardware.measure`. A trace that differs from the predicted one is rejected.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.hardware import client, traces
from bench.hardware.archive import read_complete, runs
from bench.hardware.summary import format_ms, milliseconds, summary
from plimsoll.core.slo import Slo


def measured(prediction: Path, folder: Path) -> list[dict[str, Any]]:
    """The clients' figures of each run, in the order of the prediction.

    Raises ValueError for another trace, and where a request of it has no row or a client ended badly.
    """
    predicted = json.loads((prediction / "prediction.json").read_text())
    slo, figures = Slo(**predicted["slo"]), []
    for name, digest in sorted(predicted["traces"].items()):
        sent = traces.find_trace(prediction / name, digest)
        observed = next((path for path in runs(folder) if path.name.startswith(f"{Path(name).stem}.")), None)
        if observed is None:  # not run, or the measurement was cut short
            continue
        rows = read_complete(observed, len(sent))
        after = [
            rate_figures for rate_figures in client.to_observed(rows) if rate_figures.sent_s >= predicted["warm_s"]
        ]
        figures.append({"run": Path(name).stem, **summary(after, slo, predicted["window_s"])})
    return figures


def table(predicted: dict[str, Any], measured_figures: Sequence[dict[str, Any]]) -> list[str]:
    """Markdown: a row for each rate, measured first, then each source's simulator and closed form."""
    sources, runs_of_prediction = list(predicted["from"]), [Path(name).stem for name in sorted(predicted["traces"])]
    head = ["share of line", "req/s", "in promise", "TTFT p50 / p95", "TPOT p50 / p95"]
    for source in sources:
        head += [f"{source}: in promise", "TTFT p50 / p95", "TPOT p50 / p95", "closed form: in promise, TPOT p95"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for one in measured_figures:
        number = runs_of_prediction.index(one["run"])
        row = [f"{predicted['shares_of_line'][number]:.0%}", f"{one['rate_rps']:.1f}", *_cells(one)]
        for source in sources:
            source_figures = predicted["from"][source]["rates"][number]
            tpot = source_figures["core"]["p95_tpot_s"]
            closed = f"{source_figures['core']['in_promise']:.1%}, {milliseconds(tpot)}"
            row += [*_cells(source_figures["simulator"]), closed]
        lines.append("| " + " | ".join(row) + " |")
    return lines


def _cells(one: dict[str, Any]) -> list[str]:
    return [f"{one['in_promise']:.1%}", format_ms(one["ttft_s"]), format_ms(one["tpot_s"])]


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.hardware.compare", description=__doc__)
    parser.add_argument("prediction", type=Path)
    parser.add_argument("measured", type=Path)
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args(words)
    prediction = json.loads((given.prediction / "prediction.json").read_text())
    measured_figures = measured(given.prediction, given.measured)
    print("\n".join(table(prediction, measured_figures)))
    if given.json is not None:
        given.json.write_text(json.dumps({"prediction": prediction, "measured": measured_figures}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
