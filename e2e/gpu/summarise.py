"""What is kept of a run: one small document of all scenarios, and the gateway's record of the overload.

    python -m e2e.gpu.summarise RESULTS e2e/gpu/data/h100-8b steady overload kill zero
    python -m e2e.gpu.summarise RESULTS e2e/gpu/data/h100-8b-two step trace kills rollout

Problem: the results of four scenarios are some megabytes, most of them logs. Pages and tests need a few figures.
Idea: figures by second, changes instead of samples, Events of the service and its pods, counters at the end of each
scenario, and the access log's numbers of each request, which are what the gateway learns from.
"""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from bench.hardware.itl_histogram import quantile_s
from e2e.gpu import scenarios
from e2e.gpu.run import figures, shortened, summary

GATEWAY_COLUMNS: Final = ("scenario", "began_s", "ended_s", "queue_s", "ttft_s", "prompt", "output", "status")
_COUNTERS: Final = (
    "vllm:time_to_first_token_seconds", "vllm:request_prefill_time_seconds", "vllm:request_queue_time_seconds",
)  # fmt: skip
_GAUGES: Final = ("plimsoll_autoscaler_startup_seconds", "plimsoll_autoscaler_replica_capacity_requests_per_second")
_MARK_S: Final = 0.5  # at most, from a response to the mark that notes it
_SAMPLE: Final = re.compile(r"^([^{ ]+)(\{[^}]*\})? (\S+)$")


def summarise(results: Path, out: Path, names: Sequence[str]) -> None:
    """Writes `results.json`, and `gateway.csv.gz` of an overload. Raises OSError for a scenario that is not there."""
    out.mkdir(parents=True, exist_ok=True)
    read = {name: json.loads(gzip.decompress((results / f"{name}.json.gz").read_bytes())) for name in names}
    document = {name: _summary(one) for name, one in read.items()}
    records = list(_access_log(results / f"{names[-1]}.logs.tar.zst"))  # the gateway's log goes on through all of them
    if "zero" in read:
        marks = read["zero"]["marks"]
        zero_at_s = next(mark["at"] for mark in marks if mark["what"] == "at zero")
        document["zero"]["gateway"] = _answers(records, zero_at_s, marks[-1]["at"])
    for name in (name for name in names if read[name].get("requests")):
        seconds = scenarios.SCENARIOS[name].seconds * read[name].get("shorten", 1.0)
        document[name]["cards"] = _cards(results / f"{name}.logs.tar.zst", read[name]["load_began"], seconds)
    (out / "results.json").write_text(json.dumps(document, separators=(",", ":")) + "\n")
    if "overload" in read:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([GATEWAY_COLUMNS, *_gateway_rows(records, read)])
        (out / "gateway.csv.gz").write_bytes(gzip.compress(text.getvalue().encode(), mtime=0))


def _summary(one: Mapping[str, Any]) -> dict[str, Any]:
    began_s = one.get("load_began", one["began"])
    scenario = shortened(scenarios.SCENARIOS[one["scenario"]], one.get("shorten", 1.0))
    begun = datetime.fromtimestamp(one["began"], UTC).isoformat()
    rows = one.get("requests", [])
    scrapes = one["final"]["scrapes"]
    return {
        "trace_sha256": one.get("trace_sha256"),
        "load_began": began_s,
        "figures": figures(rows, scenario) if rows else None,
        "late": _late(rows, scenario),
        "codes": _codes(rows),
        "seconds": _seconds(rows, scenario),
        "gpu_s": _gpu_seconds(one["samples"], began_s, scenario.seconds),
        "marks": [{**mark, "at": round(mark["at"] - began_s, 2)} for mark in one["marks"]],
        "changes": _changes(one["samples"], began_s),
        "events": [
            event
            for event in one["final"]["events"]
            if event["on"].startswith(("InferenceService/", "Pod/m-", "Pod/n-")) and event["at"] >= begun[:19]
        ],
        "conditions": _status(one["final"]).get("conditions"),
        "engine": [json.loads(text) for name, text in scrapes.items() if name.endswith("/about")],
        "counters": _counters(scrapes),
        "limits": _limits(one["final"]) if scenario.is_gated else None,
        "policy": scenario.policy,
        "tools": {name: _tool(found.get("result")) for name, found in one.get("tools", {}).items()},
        "rival": _rival(one.get("rival"), began_s),
        "itl_s": _itl(one.get("gaps"), scenario),
        "names": _by_name(rows, scenario.names, scenario),
        "beside": _beside(one, scenario),
        **{key: one[key] for key in ("first_answer_s", "to_zero_s", "held_s", "starts") if key in one},
    }


def _status(final: Mapping[str, Any]) -> Mapping[str, Any]:
    """The service's; nothing if the API server did not say."""
    status: Mapping[str, Any] = (final["service"] or {}).get("status", {})
    return status


def _limits(final: Mapping[str, Any]) -> Any:
    """Those of admission; None if the API server did not say."""
    items = (final["admission"] or {"items": []})["items"]
    return items[0]["limits"] if items else None


def _beside(one: Mapping[str, Any], scenario: scenarios.Scenario) -> dict[str, Any] | None:
    """The second load."""
    if not (rows := one.get("beside")) or scenario.beside is None:
        return None
    return {
        "figures": one["beside_figures"],
        "late": _late(rows, scenario),
        "codes": _codes(rows),
        "itl_s": _itl(one.get("beside_gaps"), scenario),
        "names": _by_name(rows, scenario.beside.names, scenario),
    }


def _by_name(rows: Sequence[Mapping[str, Any]], names: Sequence[str], scenario: scenarios.Scenario) -> dict[str, Any]:
    """The figures of each model name."""
    parts = {name: [row for row in rows if names[row["row"] % len(names)] == name] for name in names}
    return {name: summary(part, scenario) for name, part in parts.items()}


def _tool(result: Any) -> Any:
    """What a tool says; of GuideLLM's distributions only their percentiles."""
    if not isinstance(result, Mapping) or "benchmarks" not in result:
        return result
    metrics = result["benchmarks"][0]["metrics"]
    kept = ("prompt_token_count", "time_to_first_token_ms", "time_per_output_token_ms", "inter_token_latency_ms")
    percentiles = {name: metrics[name]["successful"]["percentiles"] for name in kept}
    return {"version": result["metadata"]["guidellm_version"], "requests": metrics["request_totals"], **percentiles}


def _rival(rows: Sequence[Mapping[str, Any]] | None, began_s: float) -> dict[str, Any] | None:
    """Answers of the second service: statuses, and when it stopped and resumed answering 200, seconds of the load."""
    if not rows:
        return None
    ordered = [(round(row["at"] - began_s, 1), row["status"]) for row in sorted(rows, key=lambda row: float(row["at"]))]
    lost = [at_s for at_s, status in ordered if status != 200]
    back = [at_s for at_s, status in ordered if status == 200 and lost and at_s > lost[-1]]
    statuses = Counter(str(status) for _, status in ordered)
    return {"statuses": statuses, "lost_s": lost[:1], "back_s": back[:1], "longest_s": max(r["seconds"] for r in rows)}


def _itl(gaps: Mapping[str, Any] | None, scenario: scenarios.Scenario) -> dict[str, float | None]:
    """Percentiles of all inter-token latencies."""
    counts = gaps or {}
    found = {name: quantile_s(counts, int(name[1:]) / 100, 0.0, scenario.seconds) for name in ("p50", "p95", "p99")}
    return {name: value and round(value, 4) for name, value in found.items()}


def _gpu_seconds(samples: Sequence[Mapping[str, Any]], began_s: float, seconds: float) -> float:
    """GPU seconds of the load: each pod has a GPU from its creation until it is gone."""
    found, end_s = 0.0, began_s + seconds
    for now, after in itertools.pairwise(samples):
        found += len(now["pods"]) * max(0.0, min(after["at"], end_s) - max(now["at"], began_s))
    return round(found, 1)


def _late(rows: Sequence[Mapping[str, Any]], scenario: scenarios.Scenario) -> list[dict[str, int]]:
    """By phase: complete responses, and those of them beyond the TTFT and the TPOT target."""
    found, begin = [], 0.0
    for _, seconds in scenario.phases:
        part = [row for row in rows if row["ok"] and begin <= row["at_s"] < begin + seconds]
        tpot = [(row["last_s"] - row["first_s"]) / max(row["output"] - 1, 1) for row in part]
        ttft = [row["first_s"] + row["late_s"] for row in part]
        found.append(
            {
                "complete": len(part),
                "ttft": sum(s > scenario.ttft_s for s in ttft),
                "tpot": sum(s > scenario.tpot_s for s in tpot),
            }
        )
        begin += seconds
    return found


def _codes(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Errors by their code: how many, the seconds of the first and the last, and the messages of these."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row["ok"]:
            continue
        try:
            error = json.loads(row["error"])["error"]
            code, message = error["code"], error["message"]
        except ValueError:
            code, message = "cut", row["error"]
        entry = found.setdefault(code, {"count": 0, "first_s": row["at_s"], "first": message})
        entry |= {"count": entry["count"] + 1, "last_s": row["at_s"], "last": message}
    return found


def _seconds(rows: Iterable[Mapping[str, Any]], scenario: scenarios.Scenario) -> list[list[Any]]:
    """By second: offered, complete, within both targets, mean and highest TTFT of the complete ones."""
    by_second: dict[int, list[Mapping[str, Any]]] = {}
    for row in rows:
        by_second.setdefault(int(row["at_s"]), []).append(row)
    found = []
    for second, part in sorted(by_second.items()):
        ttft = [row["first_s"] + row["late_s"] for row in part if row["ok"]]
        within = summary(part, scenario)["within"]
        mean = round(sum(ttft) / len(ttft), 3) if ttft else None
        found.append([second, len(part), len(ttft), within, mean, round(max(ttft), 3) if ttft else None])
    return found


def _changes(samples: Iterable[Mapping[str, Any]], began_s: float) -> list[dict[str, Any]]:
    """The samples that differ from the one before."""
    found: list[dict[str, Any]] = []
    before: dict[str, Any] = {}
    for sample in samples:
        now = {key: value for key, value in sample.items() if key not in ("at", "cpu_wait_s")}
        if now != before:
            found.append({"at": round(sample["at"] - began_s, 1), **now})
            before = now
    return found


def _counters(scrapes: Mapping[str, str]) -> dict[str, float]:
    """Sums and counts of the engine's histograms, and what the operator says of start-up time and capacity."""
    found: dict[str, float] = {}
    for text in scrapes.values():
        for line in text.splitlines():
            match = _SAMPLE.match(line)
            if match and (match[1].removesuffix("_sum").removesuffix("_count") in _COUNTERS or match[1] in _GAUGES):
                quantile = re.search(r'quantile="([^"]+)"', match[2] or "")
                found[match[1] + (f" {quantile[1]}" if quantile else "")] = float(match[3])
    return found


def _access_log(archive: Path) -> Iterator[dict[str, Any]]:
    for line in _member(archive, "*/picker/0.log").splitlines():
        text = line.split(" ", 3)[3]
        record = json.loads(text) if text.startswith("{") else {}  # a traceback is none
        if record.get("log") == "access" and record["path"] == "/v1/completions":
            record["ended"] = datetime.fromisoformat(record["time"]).timestamp()
            yield record


def _member(archive: Path, pattern: str) -> str:
    command = ["tar", "--zstd", "-xOf", str(archive), "--wildcards", pattern]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _answers(records: Iterable[Mapping[str, Any]], from_s: float, until_s: float) -> dict[str, Any]:
    """Outcomes of the requests that ended in this time: rejections by reason, and queue times of others."""
    late = [one for one in records if from_s <= one["ended"] <= until_s + _MARK_S]
    rejected = [one for one in late if one["status"] != 200]
    return {
        "rejected": Counter(str(one["reason"]) for one in rejected),
        "last_rejection_s": round(max(one["ended"] for one in rejected) - from_s, 1) if rejected else None,
        "queue_s": [one["queue_s"] for one in late if one["status"] == 200],
    }


def _cards(archive: Path, began_s: float, seconds: float) -> dict[str, list[float]]:
    """Of each card, means over the load: utilization (%), memory (MiB), power (W), clock (MHz). Its times are UTC."""
    found: dict[str, list[list[float]]] = {}
    for line in _member(archive, "log/cards.csv").splitlines():
        time, index, *values = line.split(",")
        at_s = datetime.fromisoformat(time.replace("/", "-") + "+00:00").timestamp()
        if len(values) == 4 and 0.0 <= at_s - began_s < seconds:
            found.setdefault(index.strip(), []).append([float(value) for value in values])
    return {
        index: [round(sum(column) / len(rows), 1) for column in zip(*rows, strict=True)]
        for index, rows in found.items()
    }


def _gateway_rows(records: Iterable[Mapping[str, Any]], read: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """Requests of `steady` and `overload` as the gateway saw them, in seconds since the load of the latter began."""
    zero_s = read["overload"]["load_began"]
    rows = [
        (read[name]["load_began"] + row["at_s"] - zero_s, row["prompt"], row["output"], name)
        for name in ("steady", "overload")
        if name in read
        for row in read[name]["requests"]
    ]
    by_prompt: dict[int, list[tuple[float, int, str]]] = {}
    for at_s, prompt, output, name in rows:
        by_prompt.setdefault(prompt, []).append((at_s, output, name))
    found = []
    for record in records:
        ended_s = record["ended"] - zero_s
        began_s = ended_s - record["duration_s"]
        if began_s > 125.0:
            continue
        nearest = min(by_prompt.get(record["prompt_tokens"], ()), key=lambda one: abs(one[0] - began_s), default=None)
        _, output, name = nearest if nearest and abs(nearest[0] - began_s) < 1.0 else (0.0, 0, "bench")
        times = (record["queue_s"] or 0.0, record["ttft_s"] or 0.0)
        found.append(
            (name, round(began_s, 3), round(ended_s, 3), *(round(s, 4) for s in times), record["prompt_tokens"],
             output, record["status"])
        )  # fmt: skip
    return sorted(found, key=lambda row: row[1])


if __name__ == "__main__":
    summarise(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
