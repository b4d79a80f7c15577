"""Compare predicted and measured admission control, as the tables of docs/evaluation/hardware.md.

    python -m bench.hardware.admission.compare PREDICTION_DIR MEASURED_DIR ... [--json FILE]

PREDICTION_DIR is the output of `bench.hardware.admission.predict` from before the run. Each MEASURED_DIR is an output
of `bench.hardware.admission.measure`. A trace that differs from the predicted one is rejected. The last lines give the
result: whether goodput falls as load grows, and its share of the best constant cap's goodput.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from bench.hardware import client, traces
from bench.hardware.admission.predict import OVERLOAD_FACTOR
from bench.hardware.admission.runs import (
    CAP_ARM,
    GATE_ARM,
    AdmissionRun,
    RequestOutcome,
    assess_run,
    parse_call,
    results_path,
    slo_from_document,
)
from bench.hardware.archive import read_complete
from bench.hardware.summary import format_ms

REJECTED_STATUSES: Final = frozenset({429, 503, 504})
_COLUMNS: Final = ("run", "sent/s", "goodput/s", "of offered", "of let in", "shed", "TTFT p50 / p95", "TPOT p50 / p95")


def outcomes(rows: Iterable[Mapping[str, Any]]) -> list[RequestOutcome]:
    """What the clients saw."""
    result = list(rows)
    rejected = (row.get("status", 200) in REJECTED_STATUSES for row in result)
    return [
        RequestOutcome(observed, is_rejected)
        for observed, is_rejected in zip(client.to_observed(result), rejected, strict=True)
    ]


def measured(
    prediction: Path, folders: Sequence[Path], predicted: Mapping[str, Any]
) -> dict[str, list[dict[str, Any]]]:
    """The figures of each call's runs that were played.

    Raises ValueError for another trace, and where a request of it has no row or a client ended badly.
    """
    slo, result = slo_from_document(predicted), {}
    for name, runs_of_call in predicted["calls"].items():
        rows = []
        for run in parse_call(runs_of_call):
            path = next(filter(None, (results_path(folder, run, name) for folder in folders)), None)
            trace = prediction / run.trace
            if path is None:  # cut short
                continue
            sent = traces.find_trace(trace, predicted["traces"][run.trace])
            row_outcomes = outcomes(read_complete(path, len(sent)))
            rows.append({"run": run.word, **assess_run(row_outcomes, slo, predicted["warm_s"], predicted["window_s"])})
        result[name] = rows
    return result


def table(predicted: Mapping[str, Any], measured_rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """Markdown: a line for each run of each call, what was seen and then what each source had said."""
    lines = [f"| call | by | {' | '.join(_COLUMNS)} |", "|" + "---|" * (len(_COLUMNS) + 2)]
    for name, rows in measured_rows.items():
        for row in rows:
            lines.append(f"| {name} | seen | {' | '.join(_cells(row))} |")
            for source, calls in predicted["from"].items():
                source_figures = next(one for one in calls[name] if one["run"] == row["run"])
                lines.append(f"| | {source} | {' | '.join(_cells(source_figures))} |")
    return lines


def verdicts(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Of the gate's runs: whether goodput stays, and its share of the best cap's at the overload where caps are,
    run by run and in the mean of an arm's runs."""
    admission_rows = sorted(
        (AdmissionRun.parse(row["run"], 0).factor, row["goodput_rps"]) for row in rows if _arm_name(row) == GATE_ARM
    )
    caps = [row for row in rows if _arm_name(row) == CAP_ARM]
    lines = []
    if admission_rows:
        curve = ", ".join(f"{factor:g}: {goodput:.1f}" for factor, goodput in admission_rows)
        lines.append(f"goodput behind the gate, by load: {curve}")
    at = [goodput for factor, goodput in admission_rows if factor == OVERLOAD_FACTOR]
    if caps and at:
        best_goodput = max(caps, key=lambda row: row["goodput_rps"])
        shares = ", ".join(f"{goodput / best_goodput['goodput_rps']:.1%}" for goodput in at)
        lines.append(
            f"of the best of {len(caps)} runs under a cap "
            f"({best_goodput['run']}, {best_goodput['goodput_rps']:.1f}/s): {shares}"
        )
        means = {
            word: fmean(row["goodput_rps"] for row in caps if row["run"] == word)
            for word in {row["run"] for row in caps}
        }
        cap = max(means, key=means.__getitem__)
        lines.append(f"in the mean {fmean(at):.2f}/s, {fmean(at) / means[cap]:.1%} of {cap} ({means[cap]:.2f}/s)")
    return lines


def _arm_name(row: Mapping[str, Any]) -> str:
    return AdmissionRun.parse(row["run"], 0).arm


def _cells(row: Mapping[str, Any]) -> list[str]:
    shares = [_share(row[key]) for key in ("in_promise", "admitted_in_promise", "shed")]
    return [
        row["run"],
        f"{row['offered_rps']:.1f}",
        f"{row['goodput_rps']:.1f}",
        *shares,
        format_ms(row["ttft_s"]),
        format_ms(row["tpot_s"]),
    ]


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.hardware.admission.compare", description=__doc__)
    parser.add_argument("prediction", type=Path)
    parser.add_argument("measured", type=Path, nargs="+")
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args(words)
    prediction = json.loads((given.prediction / "prediction.json").read_text())
    measured_rows = measured(given.prediction, given.measured, prediction)
    print("\n".join(table(prediction, measured_rows)))
    print("\nseen:", *verdicts([row for rows in measured_rows.values() for row in rows]), sep="\n  ")
    for source, calls in prediction["from"].items():
        print(f"{source}:", *verdicts([row for rows in calls.values() for row in rows]), sep="\n  ")
    if given.json is not None:
        given.json.write_text(json.dumps({"prediction": prediction, "measured": measured_rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
