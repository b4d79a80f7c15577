"""A document in, text out; and documents that nobody should have written."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from plimsoll.cli.cluster import ClusterQueryError
from plimsoll.cli.explain import render_document
from plimsoll.cli.output import Screen

PIPE = Screen()
UNKNOWN = {"unknown": "no engine of the tier has reported its configuration yet"}

DECODE = {
    "before": 3,
    "replicas": 5,
    "recommended": 5,
    "limits": ["rate limit"],
    "frozen": False,
    "overdue": ["chat-decode-7"],
    "etas_s": [41.0, 60.0],
    "counterfactual": "3 would give p95 TPOT 71 ms, target 50 ms",
    "reason": "forecast 41 req/s in 95 s needs 5; 3 would give p95 TPOT 71 ms, target 50 ms",
    "steps": [
        {"name": "demand", "replicas": 3, "reason": "forecast 4.5 GPU-s/s of work within 95 s: level 4, burst 0.5"},
        {
            "name": "sizing",
            "replicas": 5,
            "reason": "forecast 41 req/s in 95 s needs 5 (SLO capacity 9.1 req/s each, limited by TPOT)",
        },
    ],
}
PREFILL = {
    "before": 2,
    "replicas": 2,
    "recommended": 2,
    "limits": [],
    "frozen": True,
    "overdue": [],
    "etas_s": [],
    "counterfactual": None,
    "reason": "unknown: no metrics; replica count stays at 2",
    "steps": [{"name": "demand", "replicas": 2, "reason": "unknown: no metrics; replica count stays at 2"}],
}
DOCUMENT: dict[str, Any] = {
    "version": 2,
    "service": "team/chat",
    "at": "2026-01-01T12:00:05Z",
    "decisions": [
        {"at": "2026-01-01T12:00:04Z", "binding": "decode", "tiers": {"prefill": PREFILL, "decode": DECODE}},
        {
            "at": "2026-01-01T11:31:00Z",
            "binding": None,
            "tiers": {
                "prefill": PREFILL | {"before": 1, "reason": "1 forecast"},
                "decode": DECODE | {"before": 5, "replicas": 3, "recommended": 3, "reason": "less work"},
            },
        },
        {
            "at": "2026-01-01T11:00:00Z",
            "binding": "decode",
            "tiers": {"decode": DECODE | {"before": 5, "replicas": 5, "recommended": 4, "reason": "mode is Recommend"}},
        },
    ],
    "slo": {"window_s": 60.0, "ttft": "350ms", "tpot": "28ms", "attainment": "97%", "offered": "35 req/s"},
    "metrics": {
        "at": "2026-01-01T12:00:04.310Z",
        "gateways": {
            "count": 2,
            "coverage": 0.5,
            "silent": "gateway-b",
            "age_s": 0.0123,
            "rate_per_s": 35.2,
            "succeeded_per_s": 34.0,
            "failed_per_s": 0.0,
            "arrivals": 2100.0,
            "mean_prompt_tokens": 480.0,
            "ttft_s": 0.34,
            "e2e_s": 3.1,
            "rejected_share": 0.02,
            "queued": 3.0,
            "in_flight": 140.0,
        },
        "requests": {"mean_prompt_tokens": 470.0, "cached_tokens": 118.0, "output_tokens": 205.0},
        "tiers": {
            "prefill": {"coverage": 0.0, "age_s": None, "running": {"unknown": "none of 2 pods has answered for 15 s"}},
            "decode": {"coverage": 1.0, "age_s": 4.2, "running": 131.0},
        },
    },
    "tiers": {
        "prefill": {
            "engine": None,
            "model": UNKNOWN,
            "capacity": UNKNOWN,
            "forecast": UNKNOWN,
            "startup": {
                "variant": {"model": "Qwen/Qwen3-8B", "image": "registry/engine:2", "gpus": "1 nvidia.com/gpu"},
                "startups": 0.0,
                "phases": [{"name": "total", "p50_s": 109.0, "p90_s": 213.0, "p99_s": 300.0}],
            },
        },
        "decode": {
            "engine": {
                "model": "Qwen3ForCausalLM 36x4096",
                "accelerator": "NVIDIA H200",
                "parallelism": "1 GPU",
                "engine_version": "vllm 0.26.0",
            },
            "model": {
                "calibrated": True,
                "summary": "base known within 1.2%, work at this mix within 2.0% (one deviation)",
                "quantile": 0.75,
                "base_s": 0.0051,
                "any_prefill_s": 0.0012,
                "prefill_token_s": 3.5e-05,
                "prefill_pair_s": 2e-10,
                "sequence_s": 4e-05,
                "cached_token_s": 8e-09,
            },
            "capacity": {
                "capacity_per_s": 9.1,
                "replica_work": 0.9,
                "request_gpu_s": 0.1,
                "constraint": "TPOT",
                "infeasible": {
                    "constraint": "TPOT",
                    "feasible": {"ttft_s": None, "tpot_s": 0.022},
                    "summary": "no number of replicas meets the SLO (limited by TPOT), sized for TPOT 22 ms",
                },
            },
            "forecast": {
                "work": 4.5,
                "parts": {"level": 4.0, "trend": 0.0, "season": 0.0, "burst": 0.5, "uncertainty": 0.0},
                "rate_per_s": 36.0,
                "horizon_s": 95.0,
                "quantile": 0.95,
                "age_s": 1.0,
                "history": 0.4,
            },
            "startup": {
                "startups": 12.0,
                "measured_s": 28.1,
                "prior_s": 70.0,
                "phases": [
                    {"name": "pull", "p50_s": 9.0, "p90_s": 12.0, "p99_s": 15.0},
                    {"name": "load", "p50_s": 20.0, "p90_s": 23.0, "p99_s": 26.0},
                    {"name": "total", "p50_s": 29.0, "p90_s": 34.0, "p99_s": 40.0},
                ],
                "restart": {
                    "startups": 2.0,
                    "measured_s": 16.2,
                    "prior_s": 21.0,
                    "phases": [
                        {"name": "restart", "p50_s": 1.0, "p90_s": 1.2, "p99_s": 1.5},
                        {"name": "load", "p50_s": 15.0, "p90_s": 18.0, "p99_s": 20.0},
                        {"name": "total", "p50_s": 16.0, "p90_s": 19.0, "p99_s": 22.0},
                    ],
                },
            },
        },
    },
    "admission": {
        "version": 4,
        "classes": ["chat", "batch"],
        "costModel": {"batch": 40},
        "readyAt": 1767268840.0,
        "readyCapacity": 12.5,
        "starting": True,
        "shares": {"gateway-a": 25, "gateway-b": 15},
        "capacitySteps": [],
    },
}
GOLDEN = (Path(__file__).parent / "explained.txt").read_text()


def changed(path: str, value: Any) -> dict[str, Any]:
    """The document with one part replaced; path: keys and places, joined by dots."""
    made = copy.deepcopy(DOCUMENT)
    *way, last = (int(key) if key.isdigit() else key for key in path.split("."))
    at: Any = made
    for key in way:
        at = at[key]
    at[last] = value
    return made


def test_render_document_matches_golden_text() -> None:
    assert "\n".join(render_document(DOCUMENT, Screen(100))) + "\n" == GOLDEN


def test_render_tuned_arguments_with_their_reason() -> None:
    row = {"argument": "--max-num-batched-tokens=1024 (itl 40ms)", "reason": "a step takes 32ms"}
    made = changed("tiers.decode.tuning", [row])
    (line,) = [line for line in render_document(made, PIPE) if line.split()[:1] == ["tuning"]]
    assert line.split("  ")[-1].strip() == "--max-num-batched-tokens=1024 (itl 40ms): a step takes 32ms"


def test_render_slots_of_the_gateways_add_up() -> None:
    """Shares shrink before others grow, so meanwhile some slots have no holder."""
    made = copy.deepcopy(DOCUMENT)
    made["admission"]["shares"] = {"gateway-a": 25, "gateway-b": 1}
    (line,) = [line for line in render_document(made, PIPE) if line.split()[:1] == ["slots"]]
    assert "40 sequences per engine: gateway-a 25, gateway-b 1, 14 until another gateway releases them" in line


def test_render_capacity_names_the_class_whose_target_binds() -> None:
    text = "\n".join(render_document(changed("tiers.decode.capacity.class", "chat"), PIPE))
    assert "9.1 req/s per replica, limited by TPOT of class chat;" in text


def test_render_to_pipe_is_uncut_and_plain() -> None:
    lines = render_document(DOCUMENT, PIPE)
    assert "\x1b" not in "".join(lines)
    assert max(map(len, lines)) > 100
    assert " ".join(" ".join(lines).split()) == " ".join(GOLDEN.split())


def test_render_to_terminal_fits_its_width() -> None:
    for width in (60, 80, 120):
        assert max(map(len, render_document(DOCUMENT, Screen(width)))) <= width


@pytest.mark.parametrize(
    ("before", "replicas", "recommended", "words"),
    [
        (3, 5, 5, "decode 3 -> 5"),
        (5, 5, 5, "decode stays 5"),
        (5, 5, 4, "decode stays 5, recommended 4"),
        (None, 1, None, "decode 1, not observed"),
        (None, None, None, "decode -, not observed"),
        ("3", True, [], "decode -, not observed"),
    ],
)
def test_render_decision_summary_in_one_line(before: Any, replicas: Any, recommended: Any, words: str) -> None:
    tier = DECODE | {"before": before, "replicas": replicas, "recommended": recommended}
    lines = render_document(changed("decisions.0.tiers.decode", tier), PIPE)
    assert f"{words}, binding tier" in lines


def test_render_before_first_tick_says_nothing_decided() -> None:
    lines = render_document({**DOCUMENT, "decisions": [], "metrics": None, "tiers": {}, "admission": None}, PIPE)
    assert lines[-1] == "No decision yet: the operator has just started to observe the service."


@pytest.mark.parametrize("version", [None, 0, 1, 3, "2", True, 2.0, [1], {"a": 1}])
def test_render_unsupported_version_is_rejected(version: Any) -> None:
    with pytest.raises(ClusterQueryError, match="this program supports 2; use --json"):
        render_document({**DOCUMENT, "version": version}, PIPE)


@pytest.mark.parametrize("document", [None, [], "text", 7, True, {}, [{"version": 1}]])
def test_render_malformed_document_is_rejected(document: Any) -> None:
    with pytest.raises(ClusterQueryError):
        render_document(document, PIPE)


PARTS = [
    "service", "at", "decisions", "decisions.0", "decisions.0.at", "decisions.0.binding", "decisions.0.tiers",
    "decisions.0.tiers.decode", "decisions.0.tiers.decode.steps", "decisions.0.tiers.decode.steps.0",
    "decisions.0.tiers.decode.steps.0.reason", "decisions.0.tiers.decode.limits", "decisions.0.tiers.decode.etas_s",
    "decisions.0.tiers.decode.overdue", "decisions.0.tiers.decode.counterfactual", "decisions.1",
    "decisions.1.tiers.decode.reason", "tiers", "tiers.decode", "tiers.decode.engine", "tiers.decode.model",
    "tiers.decode.model.words", "tiers.decode.model.base_s", "tiers.decode.capacity",
    "tiers.decode.capacity.capacity_per_s",
    "tiers.decode.capacity.infeasible", "tiers.decode.forecast", "tiers.decode.forecast.parts",
    "tiers.decode.forecast.parts.level", "tiers.decode.forecast.horizon_s", "tiers.decode.forecast.quantile", "metrics",
    "metrics.at", "metrics.gateways", "metrics.gateways.coverage", "metrics.gateways.age_s", "metrics.gateways.ttft_s",
    "metrics.gateways.rejected_share", "metrics.requests", "metrics.requests.cached_tokens", "metrics.tiers",
    "metrics.tiers.decode", "metrics.tiers.decode.running", "tiers.decode.startup", "tiers.decode.startup.startups",
    "tiers.decode.startup.measured_s", "slo", "slo.window_s", "slo.ttft", "metrics.gateways.silent",
    "tiers.decode.startup.phases", "tiers.decode.startup.phases.0", "tiers.decode.startup.restart",
    "tiers.decode.startup.restart.phases", "tiers.decode.startup.restart.startups",
]  # fmt: skip


@pytest.mark.parametrize("part", PARTS)
def test_render_malformed_part_still_shows_the_rest(part: str) -> None:
    nonsense: tuple[Any, ...] = (
        None,
        True,
        -1,
        10**400,
        float("nan"),
        float("inf"),
        1e308,
        "",
        "x\x1b[2J\n{}",
        [],
        [[]],
        {},
        {"a": {}},
    )
    for value in nonsense:
        for screen in (PIPE, Screen(40)):
            text = "\n".join(render_document(changed(part, value), screen))
            assert "\x1b" not in text
            assert "nan" not in text
            assert "Traceback" not in text


def test_render_hostile_text_is_escaped() -> None:
    hostile = json.loads(json.dumps(DOCUMENT).replace("Qwen3", "\\u001b]0;owned\\u0007").replace("needs", "\\u009b2J"))
    text = "".join(render_document(hostile, Screen(100, supports_colour=False)))
    assert text.isprintable()
