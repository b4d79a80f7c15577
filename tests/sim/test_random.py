"""What `plimsoll simulate` says of random traces and manifests, held against the rows that it writes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml

from plimsoll.cli.main import main
from plimsoll.core import units
from plimsoll.sim.result import WINDOW_REQUESTS
from tests import builders

Row = Mapping[str, Any]
POLICIES = ("plimsoll", "plimsoll", "plimsoll", "hpa-queue", "kpa", "follower:cap=30", "clairvoyant:runs=2")
CLASSES = (
    {"name": "high", "priority": 10, "slo": {"ttft": "5s", "tpot": "100ms"}},
    {"name": "low", "priority": -1, "slo": {"ttft": "60s"}, "maxUtilization": "60%"},
)


def trace(random: Random) -> list[dict[str, Any]]:
    """Blocks' names come again at any place, and some requests come at one moment."""
    at_s, found = 0.0, []
    rate = random.choice((0.5, 5.0, 40.0))
    for _ in range(random.choice((1, 40, 550)) if rate > 1.0 else 30):
        at_s += random.expovariate(rate) if random.random() < 0.8 else 0.0
        prompt = max(1, round(random.lognormvariate(math.log(2000), 0.8)))
        found.append(
            {
                "arrival_s": round(at_s, 3),
                "prompt_tokens": prompt,
                "output_tokens": max(1, round(random.lognormvariate(math.log(60), 0.8))),
                "priority": random.choice(("high", "low", "strange", "")),
                "tenant": random.choice(("a", "b", "")),
                "client": random.choice(("c", "d")),
                "hash_ids": [random.randrange(-3, 30) for _ in range(-(-prompt // 512))],
            }
        )
    return found


def spec(random: Random) -> dict[str, Any]:
    least = random.choice((0, 1))
    roles = random.choice((("serve",), ("prefill", "decode")))
    admission: dict[str, Any] = {"whenFull": random.choice(("Queue", "Shed", "Downgrade"))}
    if admission["whenFull"] == "Downgrade":
        admission["fallback"] = {"name": "small"}
    if random.random() < 0.6:
        admission["classes"] = list(CLASSES)
    if random.random() < 0.5:
        admission["tenants"] = [{"name": "a", "requestsPerSecond": "0.5"}, {"name": "b", "tokensPerMinute": 9000}]
    slo = {"ttft": "1s", "tpot": random.choice(("15ms", "40ms")), "ttftPerKToken": random.choice(("0s", "100ms"))}
    if random.random() < 0.3:
        slo["e2e"] = "10s"
    return {
        "slo": slo,
        "admission": admission,
        "tiers": {role: {"minReplicas": least, "maxReplicas": 3, "gpus": random.choice((1, 2))} for role in roles},
        "engine": {"args": [f"--max-num-seqs={random.choice((4, 256))}"]},
        "scaling": {"sloMissCost": random.choice((0, 25))},
    }


def attained(row: Row, desired: Mapping[str, Any]) -> bool:
    """By the manifest and the row alone."""
    own = {one["name"]: one["slo"] for one in desired["admission"].get("classes", ())}
    slo = own.get(row["class"], own.get("low", desired["slo"]))
    target_s = {name: units.parse_duration(text) for name, text in slo.items()}
    if row["outcome"] != "ok":
        return False
    first_s = target_s["ttft"] + target_s.get("ttftPerKToken", 0.0) * row["prompt_tokens"] / 1000
    whole_s = row["ended_s"] - row["sent_s"]
    paced = (row["tpot_s"] or 0.0) <= target_s.get("tpot", math.inf)
    return row["ttft_s"] <= first_s and paced and whole_s <= target_s.get("e2e", math.inf)


def replica_seconds(rows: Sequence[Row], until_s: float) -> float:
    ends = [*(one["t_s"] for one in rows[1:]), until_s]
    spans = [max(0.0, min(end_s, until_s) - one["t_s"]) for one, end_s in zip(rows, ends, strict=True)]
    return sum((one["ready"] + one["starting"] + one["draining"]) * s for one, s in zip(rows, spans, strict=True))


def nearest(values: Iterable[float | None], share: float) -> float | None:
    known = sorted(one for one in values if one is not None)
    return known[max(1, math.ceil(share * len(known))) - 1] if known else None


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("seed", range(14))
def test_simulate_summary_follows_from_written_rows(
    seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    random = Random(seed)
    requested, desired = trace(random), spec(random)
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, requested)))
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(builders.service(**desired)))
    outs = {name: tmp_path / name for name in ("requests", "replicas", "windows")}
    words = ["simulate", "--trace", str(tmp_path / "t.jsonl"), "--service", str(tmp_path / "s.yaml")]
    words += ["--hardware", random.choice(("h200-8b", "h200-70b")), "--policy", random.choice(POLICIES)]
    words += ["--start-up", random.choice(("0", "uniform:5,20")), "--clients", random.choice(("none", "mixed"))]
    words += [word for name, path in outs.items() for word in (f"--{name}-out", str(path))]
    assert main([*words, "--output", "json", "--seed", str(seed)]) == 0
    output = json.loads(capsys.readouterr().out)
    rows, windows = read(outs["requests"]), read(outs["windows"])
    first = sorted((one for one in rows if "attempt" not in one), key=lambda one: int(one["id"]))
    met = [attained(one, desired) for one in first]

    assert output["offered"] == len(first) == len(requested)
    ends = {"completed": "ok", "shed": "shed", "refused": "refused", "downgraded": "downgraded"}
    ends |= {"failed": "failed", "unfinished": "unfinished"}
    for key, outcome in ends.items():
        assert output[key] == sum(one["outcome"] == outcome for one in first), key
    assert output["offered"] == sum(output[key] for key in ends)
    assert output["admitted"] == output["completed"] + output["failed"] + output["unfinished"]
    assert output["retries"] == len(rows) - len(first)
    assert output["attainment_offered"] == pytest.approx(sum(met) / len(met), abs=1e-5)
    sizes = [one["prompt_tokens"] + one["output_tokens_asked"] for one in first]
    kept = sum(size for size, good in zip(sizes, met, strict=True) if good)
    assert output["attainment_tokens"] == pytest.approx(kept / sum(sizes), abs=1e-5)
    for key in ("ttft_s", "tpot_s"):
        for share in (50, 95, 99):
            found = nearest((one[key] for one in first), share / 100)
            said = output[f"p{share}_{key}"]
            assert (said is None) is (found is None)
            assert found is None or abs(said - found) <= 0.0026 * found + 1.1e-5  # both sides are rounded
    assert output["windows"]["n"] == len(windows) == output["offered"] // WINDOW_REQUESTS
    for one in windows:
        assert one["met"] == sum(met[one["n"] * WINDOW_REQUESTS : (one["n"] + 1) * WINDOW_REQUESTS])
    hours = 0.0
    for tier, limits in desired["tiers"].items():
        spans = [one for one in read(outs["replicas"]) if one["tier"] == tier]
        assert all(0 <= one["desired"] <= limits["maxReplicas"] for one in spans)
        found = replica_seconds(spans, output["paid_until_s"])
        assert output["replica_seconds"][tier] == pytest.approx(found, rel=1e-4, abs=0.01)
        hours += found * limits["gpus"] / 3600
    assert output["gpu_hours"] == pytest.approx(hours, rel=1e-4, abs=2e-5)
