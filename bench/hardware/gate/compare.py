"""Prediction and measurement of the gate side by side, as the tables of docs/hardware.md.

    python -m bench.hardware.gate.compare PREDICTION_DIR MEASURED_DIR ... [--json FILE]

PREDICTION_DIR is what `bench.hardware.gate.predict` wrote before the run, each MEASURED_DIR what
`bench.hardware.gate.measure` did. A trace that is not the one that was predicted is refused. The last lines say what
was to be shown: that goodput does not fall with the load, and what share of the best constant cap's it is.
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
from bench.hardware.gate.predict import OVERLOAD
from bench.hardware.gate.runs import CAP, GATE, One, Run, call, judged, seen_path, slo_of
from bench.hardware.keep import complete
from bench.hardware.summary import shown

REFUSED: Final = frozenset({429, 503, 504})
_SHOWN: Final = ("run", "sent/s", "goodput/s", "of offered", "of let in", "shed", "TTFT p50 / p95", "TPOT p50 / p95")


def ones(rows: Iterable[Mapping[str, Any]]) -> list[One]:
    """What the clients saw."""
    listed = list(rows)
    turned = (row.get("status", 200) in REFUSED for row in listed)
    return [One(seen, away) for seen, away in zip(client.seen(listed), turned, strict=True)]


def measured(prediction: Path, folders: Sequence[Path], told: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The figures of each call's runs that were played.

    Raises ValueError for another trace, and where a request of it has no row or a client ended badly.
    """
    slo, found = slo_of(told), {}
    for name, words in told["calls"].items():
        rows = []
        for run in call(words):
            path = next(filter(None, (seen_path(folder, run, name) for folder in folders)), None)
            trace = prediction / run.trace
            if path is None:  # cut short
                continue
            sent = traces.predicted(trace, told["traces"][run.trace])
            mine = ones(complete(path, len(sent)))
            rows.append({"run": run.word, **judged(mine, slo, told["warm_s"], told["window_s"])})
        found[name] = rows
    return found


def table(told: Mapping[str, Any], found: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """Markdown: a line for each run of each call, what was seen and then what each source had said."""
    lines = [f"| call | by | {' | '.join(_SHOWN)} |", "|" + "---|" * (len(_SHOWN) + 2)]
    for name, rows in found.items():
        for row in rows:
            lines.append(f"| {name} | seen | {' | '.join(_cells(row))} |")
            for source, calls in told["from"].items():
                said = next(one for one in calls[name] if one["run"] == row["run"])
                lines.append(f"| | {source} | {' | '.join(_cells(said))} |")
    return lines


def verdicts(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Of the gate's runs: whether goodput stays, and its share of the best cap's at the overload where caps are,
    run by run and in the mean of an arm's runs."""
    gates = sorted((Run.parse(row["run"], 0).factor, row["goodput_rps"]) for row in rows if _arm(row) == GATE)
    caps = [row for row in rows if _arm(row) == CAP]
    lines = []
    if gates:
        curve = ", ".join(f"{factor:g}: {goodput:.1f}" for factor, goodput in gates)
        lines.append(f"goodput behind the gate, by load: {curve}")
    at = [goodput for factor, goodput in gates if factor == OVERLOAD]
    if caps and at:
        best = max(caps, key=lambda row: row["goodput_rps"])
        shares = ", ".join(f"{goodput / best['goodput_rps']:.1%}" for goodput in at)
        lines.append(
            f"of the best of {len(caps)} runs under a cap ({best['run']}, {best['goodput_rps']:.1f}/s): {shares}"
        )
        means = {
            word: fmean(row["goodput_rps"] for row in caps if row["run"] == word)
            for word in {row["run"] for row in caps}
        }
        cap = max(means, key=means.__getitem__)
        lines.append(f"in the mean {fmean(at):.2f}/s, {fmean(at) / means[cap]:.1%} of {cap} ({means[cap]:.2f}/s)")
    return lines


def _arm(row: Mapping[str, Any]) -> str:
    return Run.parse(row["run"], 0).arm


def _cells(row: Mapping[str, Any]) -> list[str]:
    shares = [_share(row[key]) for key in ("in_promise", "admitted_in_promise", "shed")]
    return [
        row["run"],
        f"{row['offered_rps']:.1f}",
        f"{row['goodput_rps']:.1f}",
        *shares,
        shown(row["ttft_s"]),
        shown(row["tpot_s"]),
    ]


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.hardware.gate.compare", description=__doc__)
    parser.add_argument("prediction", type=Path)
    parser.add_argument("measured", type=Path, nargs="+")
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args(words)
    told = json.loads((given.prediction / "prediction.json").read_text())
    found = measured(given.prediction, given.measured, told)
    print("\n".join(table(told, found)))
    print("\nseen:", *verdicts([row for rows in found.values() for row in rows]), sep="\n  ")
    for source, calls in told["from"].items():
        print(f"{source}:", *verdicts([row for rows in calls.values() for row in rows]), sep="\n  ")
    if given.json is not None:
        given.json.write_text(json.dumps({"prediction": told, "measured": found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
