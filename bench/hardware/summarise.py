"""Summaries of measured runs, small enough for the repository.

    python -m bench.hardware.summarise MEASURED ... --out DIR [--prediction DIR]

Problem: raw runs (requests, step logs, clocks) have megabytes each, and docs and tests need a few values of them.

Idea: the tools that make the tables run once over the raw run. `summary.json` has their values, `summary.md` their
tables. `result.json` and `prediction.json` are copied; in the former the output folder becomes OUT. Several MEASURED
are calls with admission control of one prediction. Only the first one's steps are summarised. A trace that is not the
predicted one, and a request without a row, are errors.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench.hardware import archive, compare, compare_pd, fit_step_model, itl_histogram, long_steps, self_benchmarks
from bench.hardware.admission import compare as admission_compare
from bench.hardware.admission import windowed_slo
from plimsoll.core.planning.engine_settings import DEFAULT_GRAPH_TOKENS
from plimsoll.sim import profile

SUMMARY: Final = "summary.json"
_MIN_SEQUENCES: Final = (0, 32)  # fits of all steps, and of those with as many sequences
_DIGITS: Final = 6


@dataclass(frozen=True)
class Profiles:
    """Hardware profiles of a pair: `decode` for the verdict on transfers, `steps` for the excess of long steps."""

    decode: str = "h200-8b-cool"
    steps: str = "h200-8b"


def read(folder: Path) -> dict[str, Any]:
    """The figures that a run left: rates, admission, windows, pairs, steps and long_steps, where it has them."""
    document: dict[str, Any] = json.loads((folder / SUMMARY).read_text())
    return document


def figures(measured: Sequence[Path], prediction: Path | None, profiles: Profiles) -> dict[str, Any]:
    """All figures of a measurement, to six digits. Raises ValueError for another trace and for incomplete runs."""
    first, found = measured[0], dict[str, Any]()
    predicted = None if prediction is None else json.loads((prediction / "prediction.json").read_text())
    if predicted is not None and prediction is not None:
        if "shares_of_line" in predicted:
            found["rates"] = compare.measured(prediction, first)
        elif "mean_line_rps" in predicted:
            found["windows"] = list(windowed_slo.measured(prediction, first))
        elif "calls" in predicted:
            found["admission"] = admission_compare.measured(prediction, measured, predicted)
    if _pair_runs(first):
        found["pairs"] = _pair_figures(first, profiles.decode)
        found["long_steps"] = _long_steps(first, profiles.steps)
    elif _has_steps(first):
        found["steps"] = _step_figures(first)
    rounded: dict[str, Any] = _round(found)
    return rounded


def _has_steps(folder: Path) -> bool:
    return next(folder.glob("engine.steps.csv*"), None) is not None


def _pair_runs(folder: Path) -> list[Path]:
    return [path for path in archive.runs(folder) if ".pd." in path.name or ".agg." in path.name]


def _pair_figures(folder: Path, profile_name: str) -> list[dict[str, Any]]:
    rows, before = [], compare_pd.transfer_counters("")
    for path in _pair_runs(folder):
        document, name = archive.read_run(path), path.name.split(".requests.json")[0]
        requests, metrics = archive.read_complete(path), folder / f"{name}.requests.d.metrics.txt"
        after = compare_pd.transfer_counters(metrics.read_text()) if metrics.exists() else before
        change, before = {key: after[key] - before[key] for key in after}, after
        verdict = compare_pd.verdict_of_run(path.name, change, requests, profile.load(profile_name))
        late_s = itl_histogram.quantile_s(
            document.get("gaps", {}), 0.99, compare_pd.WARM_S, compare_pd.WARM_S + compare_pd.WINDOW_S
        )
        rows.append(
            {"run": name, "trace": document["trace"], "requests": len(requests), "itl_p99_s": late_s}
            | {"figures": compare_pd.figures(requests), "decode_engine": change, "verdict": verdict}
        )
    return rows


def _long_steps(folder: Path, profile_name: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for log in sorted(folder.glob("*.steps.csv*")):
        engine = log.name.split(".")[0]
        for path in _pair_runs(folder):
            run = path.name.split(".requests.json")[0]
            steps = long_steps.measured_steps(folder, engine, run)
            if len(steps) > 4:  # else another engine's run
                rows = long_steps.excess_by_tokens(steps, profile.load(profile_name))
                found.setdefault(engine, {})[run] = [None if row is None else row._asdict() for row in rows]
    return found


def _step_figures(folder: Path) -> dict[str, Any]:
    path = next(folder.glob("engine.steps.csv*"))
    log = fit_step_model.read_steps(path)
    found: dict[str, Any] = {"fits": {}, "over_data_sheet": {}}
    for least in _MIN_SEQUENCES:
        with contextlib.suppress(ValueError):  # too few such steps
            found["fits"][str(least)] = fit_step_model.fit(folder, path, least)
            model = self_benchmarks.prior_models(folder).get("data sheet")
            if model is not None:
                found["over_data_sheet"][str(least)] = self_benchmarks.time_ratio(folder, least, model)
    beyond = {**log, "npre": log["npre"] * (log["pretok"] + log["ndec"] > DEFAULT_GRAPH_TOKENS)}
    rows, seconds, _, _ = fit_step_model.step_blocks(beyond)
    law = fit_step_model.fit_coefficients(rows, seconds)
    found["law_with_launches_beyond_graphs"] = dict(zip(fit_step_model.COEFFICIENTS, law.tolist(), strict=True))
    return found


def tables(measured: Sequence[Path], prediction: Path | None, profiles: Profiles, found: dict[str, Any]) -> str:
    """Markdown: what the tools print of these runs."""
    first, said = measured[0], str(prediction)
    parts: list[tuple[str, str]] = []
    if "rates" in found:
        parts.append(("compare", _printed(compare.main, [said, str(first)])))
    if "admission" in found:
        parts.append(("admission.compare", _printed(admission_compare.main, [said, *map(str, measured)])))
    if "windows" in found:
        parts.append(("admission.windowed_slo", _printed(windowed_slo.main, ["compare", f"{said}={first}"])))
    if "pairs" in found:
        lines = [f"- {row['run']}: {row['verdict']}" for row in found["pairs"] if row["verdict"]]
        text = _printed(compare_pd.main, [str(first), "--profile", profiles.decode])
        parts.append(("compare_pd", "\n".join([text, *lines])))
        for engine, runs in found["long_steps"].items():
            words = [str(first), engine, *runs, "--profile", profiles.steps]
            parts.append((f"long_steps, engine {engine}", _printed(long_steps.main, words)))
    if "steps" in found:
        for least in found["steps"]["over_data_sheet"]:
            words = [str(first), "--from-sequences", least]
            parts.append((f"self_benchmarks --from-sequences {least}", _printed(self_benchmarks.main, words)))
    return "\n\n".join(f"## {title}\n\n{text.strip()}" for title, text in parts)


def _printed(tool: Callable[[Sequence[str]], int], words: Sequence[str]) -> str:
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(io.StringIO()):
        tool(words)
    return text.getvalue()


def _round(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _round(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_round(item) for item in value]
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float | np.floating) else value


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.hardware.summarise", description=__doc__)
    parser.add_argument("measured", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--prediction", type=Path, metavar="DIR", help="what was predicted, with its traces")
    parser.add_argument("--profile", default=Profiles.decode, help="of a decode engine, for the verdict (%(default)s)")
    parser.add_argument("--steps-profile", default=Profiles.steps, help="of a pair's steps (%(default)s)")
    given = parser.parse_args(words)
    profiles = Profiles(given.profile, given.steps_profile)
    try:
        found = figures(given.measured, given.prediction, profiles)
    except ValueError as error:
        print(f"summarise: {error}", file=sys.stderr)
        return 1
    given.out.mkdir(parents=True, exist_ok=True)
    name = given.out.resolve().name
    text = tables(given.measured, given.prediction, profiles, found)
    (given.out / SUMMARY).write_text(json.dumps(found, indent=1) + "\n")
    (given.out / "summary.md").write_text(f"# {name}\n\n{text}\n")
    result = archive.without_folder((given.measured[0] / "result.json").read_text())
    (given.out / "result.json").write_text(result)
    if given.prediction is not None and given.prediction.resolve() != given.out.resolve():
        shutil.copy(given.prediction / "prediction.json", given.out / "prediction.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
