"""`plimsoll plan` as it is typed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from plimsoll.cli import plan_output
from plimsoll.cli.main import build_parser, main
from plimsoll.cli.plan import profile_machines
from plimsoll.core.capacity.sizing import Infeasible
from plimsoll.core.capacity.tier_model import Constraint
from plimsoll.core.planning import known_models, workloads
from plimsoll.core.planning.arrangement import Arrangement
from plimsoll.core.planning.fleet_plan import FleetPlan, PlanFailure, PlanRequest, make_plan
from plimsoll.core.slo import Slo
from plimsoll.sim import profile, profiles

MEASURED = ["plan", "--no-simulation", "--hardware", "h200-8b", "--ttft", "500ms", "--tpot", "50ms"]
MEAN_LOAD = ["--rate", "24", "--prompt-tokens", "1200", "--output-tokens", "220"]
BY_NAME = ["plan", "--no-simulation", "--tpot", "50ms", "--gpu", "H200", *MEAN_LOAD]


def test_plan_json_and_table_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "c.svg"
    words = [*MEASURED, *MEAN_LOAD, "--gpu-hour-cost", "3.5", "--picture", str(picture)]
    assert main([*words, "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert output["arrangement"] == "aggregated"
    assert output["gpus"] == output["tiers"]["serve"]["replicas"] == 2
    assert output["expected"]["p95_tpot_s"] < 0.05
    assert output["slo_capacity_per_s"] > 24 > 0
    tokens_an_hour = 24 * 3600 * (output["prompt_tokens"] + output["output_tokens"])
    per_million = output["cost"]["per_million_tokens"]
    assert per_million["at_this_load"] == pytest.approx(7.0 / tokens_an_hour * 1e6, rel=1e-3)
    assert per_million["at_slo_capacity"] < per_million["at_this_load"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("aggregated: 2 x 1 GPU serve, 2 GPUs")
    assert f"max_num_seqs             {output['tiers']['serve']['max_num_seqs']}" in shown
    assert f"{output['slo_capacity_per_s']:.3g}" in shown
    assert "roofline" not in shown
    texts = [one.text for one in ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}text")]
    assert "h200-8b, 2 GPUs" in texts
    assert "requested rate 24" in texts


def test_plan_model_by_name_and_by_file_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {
        "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    answers = []
    for model in ("Llama-3.1-8B", str(tmp_path / "config.json")):
        words = [
            "plan",
            "--no-simulation",
            "--model",
            model,
            "--gpu",
            "h200",
            "--gpus-per-replica",
            "1",
            "--tpot",
            "50ms",
        ]
        assert main([*words, "--ttft", "500ms", *MEAN_LOAD, "--json"]) == 0
        answers.append(json.loads(capsys.readouterr().out))
    assert answers[0] == answers[1]
    assert answers[0]["tiers"]["serve"]["steps"] == "roofline"


@pytest.mark.parametrize(
    ("words", "largest"),
    [
        (["--model", "Qwen3-30B-A3B", "--gpu", "H200", "--gpus-per-replica", "1"], 8192),
        (["--hardware", "h200-30b-a3b"], 8192),
        (["--model", "Qwen3-8B", "--gpu", "H200", "--gpus-per-replica", "1"], None),
        (["--hardware", "h200-8b"], None),
    ],
)
def test_plan_larger_cuda_graphs_only_for_moe(
    words: list[str], largest: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["plan", "--no-simulation", *words, "--ttft", "1s", "--tpot", "50ms", "--rate", "15", *MEAN_LOAD[2:]]
    assert main([*arguments, "--json"]) == 0
    tier = json.loads(capsys.readouterr().out)["tiers"]["serve"]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    if largest is None:
        assert tier["cuda_graphs"] is None
        assert "graphs" not in shown
        return
    flag, *sizes = tier["cuda_graphs"]["args"]
    assert flag == "--cudagraph-capture-sizes"
    assert int(sizes[-1]) == min(largest, tier["max_num_batched_tokens"])
    assert f"CUDA graphs (serve): {tier['cuda_graphs']['reason']}" in shown
    assert f"  {flag} {' '.join(sizes)}\n" in shown
    assert not tier["speculation"]["on"]


@pytest.mark.parametrize(
    ("words", "manifest"),
    [
        (["--gpus-per-replica", "1", "--itl", "150ms"], {"engine": {"tuning": "Auto"}}),
        (["--itl", "40ms"], {"engine": {"args": ["--max-num-batched-tokens", "4096"]}}),  # of two GPUs
        (["--gpus-per-replica", "1"], {}),
    ],
)
def test_plan_manifest_prefers_tuning(
    words: list[str], manifest: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    load = ["--rate", "17", "--prompt-tokens", "1190", "--output-tokens", "220", "--ttft", "500ms", "--tpot", "30ms"]
    arguments = ["plan", "--no-simulation", "--model", "Llama-3.1-8B", "--gpu", "H200", *load, *words]
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["manifest"] == manifest
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert ("manifest: engine: {tuning: Auto}" in shown, "manifest: engine: {args: [" in shown) == (
        "tuning" in str(manifest),
        "args" in str(manifest),
    )


def test_plan_trace_uses_busiest_minutes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = ["arrival_s,prompt_tokens,output_tokens"]
    lines += [f"{at},100,10" for at in range(0, 400, 4)]
    lines += [f"{400 + at / 8},1200,220" for at in range(8 * 300)]
    (tmp_path / "t.csv").write_text("\n".join(lines))
    assert main([*MEASURED, "--trace", str(tmp_path / "t.csv"), "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert output["rate_per_s"] == pytest.approx(8.0, rel=0.01)
    assert output["prompt_tokens"] == pytest.approx(1200, rel=0.01)


def test_plan_busiest_window_excludes_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = ["arrival_s,prompt_tokens,output_tokens", *(f"{n / 8},1200,220" for n in range(8 * 300))]
    (tmp_path / "t.csv").write_text("\n".join([*lines, "300,9000,220", "900,100,10"]))
    assert main([*MEASURED, "--trace", str(tmp_path / "t.csv"), "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert (output["rate_per_s"], output["prompt_tokens"]) == (8.0, 1200.0)


@pytest.mark.parametrize(
    ("text", "said"),
    [("[" * 100_000, "not JSON: too deep"), ('{"num_hidden_layers": 1' + "0" * 400 + "}", "401 digits")],
)
def test_plan_unreadable_model_file_is_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    assert main([*BY_NAME, "--model", str(path)]) == 1
    output = capsys.readouterr().err
    assert f"--model: {path}: not JSON" in output
    assert said in output


def test_plan_document_combines_infeasible_share_of_both_tiers() -> None:
    workload, slo = workloads.lognormal_workload(1200.0, 220.0), Slo(0.95, 0.5, tpot_s=0.05)
    found = make_plan(PlanRequest(workload, slo, 24.0, [profile_machines(profile.load("h200-8b"), 1)]))
    assert isinstance(found, FleetPlan)
    assert isinstance(found.alternative, Arrangement)
    first, second = found.alternative.sizings
    hopeless = replace(first, infeasible_share=0.1), replace(second, infeasible_share=0.2)
    both = replace(found, chosen=replace(found.alternative, sizings=hopeless))
    assert plan_output.plan_document(both, None)["infeasible_alone"] == pytest.approx(1 - 0.9 * 0.8)


def test_plan_infeasible_slo_suggests_nearest_feasible(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["plan", "--no-simulation", "--hardware", "h200-8b", "--ttft", "500ms", "--tpot", "3ms", *MEAN_LOAD]) == 1
    )
    said = capsys.readouterr().err
    assert "no number of replicas meets the SLO, because of TPOT" in said
    assert "feasible targets: --ttft 500ms --tpot 6" in said


def test_plan_e2e_target_needs_more_gpus_and_names_constraint(capsys: pytest.CaptureFixture[str]) -> None:
    lines = {}
    for whole in ("1m", "8s"):
        assert main([*MEASURED, "--e2e", whole, *MEAN_LOAD, "--json"]) == 0
        output = json.loads(capsys.readouterr().out)
        lines[whole] = output["slo_capacity_per_s"] / output["gpus"]
        assert output["slo"]["e2e_s"] == {"1m": 60.0, "8s": 8.0}[whole]
    assert output["binding"] == "e2e"
    assert lines["8s"] < lines["1m"]
    assert main([*MEASURED, "--e2e", "1s", *MEAN_LOAD]) == 1
    said = capsys.readouterr().err
    assert "no number of replicas meets the SLO, because of e2e" in said
    assert "feasible targets: --ttft 500ms --tpot 50ms --e2e " in said


def test_plan_itl_target_needs_more_gpus_and_names_constraint(capsys: pytest.CaptureFixture[str]) -> None:
    reported = {}
    for gap in ("2s", "80ms", "30ms", "10ms"):
        assert main([*MEASURED, "--itl", gap, *MEAN_LOAD, "--json"]) == 0
        reported[gap] = json.loads(capsys.readouterr().out)
    assert reported["30ms"]["slo"]["itl_s"] == 0.03
    assert [one["arrangement"] for one in reported.values()] == [*["aggregated"] * 2, *["disaggregated"] * 2]
    assert reported["80ms"]["binding"] == "itl"
    assert reported["80ms"]["tiers"]["serve"]["max_num_batched_tokens"] == 4096  # 16,384 would carry no more
    assert reported["10ms"]["tiers"]["decode"]["binding"] == "itl"
    gpus = [one["gpus"] for one in reported.values()]
    assert gpus == sorted(gpus)
    assert gpus[0] < gpus[-1]
    assert main([*MEASURED, "--itl", "3ms", *MEAN_LOAD]) == 1
    said = capsys.readouterr().err
    assert "no number of replicas meets the SLO, because of itl" in said
    assert "feasible targets: --ttft 500ms --tpot 50ms --itl " in said


def test_plan_too_many_infeasible_alone_suggests_feasible_slo(
    capsys: pytest.CaptureFixture[str],
) -> None:
    long = ["--rate", "24", "--prompt-tokens", "16000", "--output-tokens", "220"]
    assert main([*MEASURED, *long]) == 1
    *reasons, output = capsys.readouterr().err.splitlines()
    names = ("one aggregated tier", "a prefill and a decode tier")
    for name, reason in zip(names, reasons, strict=True):
        assert reason.startswith(
            f"plimsoll: {name} is not possible: no number of replicas meets the SLO, because of TTFT: "
        )
        assert reason.endswith("% of the requests miss it even on an idle replica, and 5% may")
    feasible_targets = output.removeprefix("feasible targets: ").split()
    assert main(["plan", "--no-simulation", "--hardware", "h200-8b", *feasible_targets, *long, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["infeasible_alone"] <= 0.05
    assert min(tier["attained"] for tier in document["tiers"].values()) >= 0.95


def test_plan_requests_beyond_max_model_len_are_infeasible(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--ttft", "500ms", "--tpot", "50ms", *MEAN_LOAD]
    name = str(_changed(tmp_path, max_model_len=1))
    assert main(["plan", "--no-simulation", "--hardware", name, *arguments]) == 1
    output = capsys.readouterr().err
    assert (
        "100.0% of the requests, prompt and answer together, are longer than the engine's max_model_len of 1" in output
    )
    name = str(_changed(tmp_path, max_model_len=3000))
    assert main(["plan", "--no-simulation", "--hardware", name, *arguments, "--percentile", "99"]) == 1
    output = capsys.readouterr().err
    assert "4.3% of the requests, prompt" in output
    assert "--percentile 95 or less may" in output
    assert main(["plan", "--no-simulation", "--hardware", name, *arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["longer_than_max_model_len"] == found["infeasible_alone"] == pytest.approx(11 / 256, abs=1e-6)
    assert 0.95 <= found["tiers"]["serve"]["attained"] <= 1 - found["longer_than_max_model_len"]
    assert all(opened <= 0.97 * rate for rate, opened, _ in found["curve"])
    assert main(["plan", "--no-simulation", "--hardware", name, *arguments]) == 0
    assert "exceed its max_model_len of 3000 tokens" in capsys.readouterr().out


def _changed(folder: Path, **values: float) -> Path:
    """The profile of an 8B with other values."""
    path = folder / "profile.json"
    path.write_text(json.dumps(json.loads((profiles.PROFILE_FOLDER / "h200-8b.json").read_text()) | values))
    return path


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("base", 1e-300, "base is 1e-300 s, must be"),
        ("base", 1e308, "base is 1e+308 s, must be"),
        ("pretok", 1e308, "pretok is 1e+308 s, must be at most 3600"),
    ],
)
def test_plan_impossible_step_times_are_rejected(
    tmp_path: Path, key: str, value: float, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _changed(tmp_path, anypre=0, **{key: value})
    assert main(["plan", "--no-simulation", "--hardware", str(path), "--tpot", "50ms", *MEAN_LOAD]) == 1
    assert f"--hardware: {path}: {said}" in capsys.readouterr().err


def test_plan_profile_uses_given_gpus_per_replica(capsys: pytest.CaptureFixture[str]) -> None:
    """Of which a profile knows nothing, nor whether its steps were measured: that of h100x2-32b is a roofline."""
    arguments = [
        "plan",
        "--no-simulation",
        "--hardware",
        "h100x2-32b",
        "--ttft",
        "1s",
        "--tpot",
        "50ms",
        "--rate",
        "1",
        *MEAN_LOAD[2:],
    ]
    assert main(arguments) == 0
    assert "GPUs per replica: 1, from --gpus-per-replica (default 1)" in capsys.readouterr().out
    assert main([*arguments, "--gpus-per-replica", "2", "--gpu-hour-cost", "3"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("aggregated: 1 x 2 GPU serve, 2 GPUs")
    assert "6.00 per hour" in shown
    assert "GPUs per replica: 2," in shown
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tiers"]["serve"]["steps"] == "profile"


@pytest.mark.parametrize(
    ("option", "target", "named"), [("--itl", "40ms", "itl of 40 ms"), ("--e2e", "5s", "e2e of 5 s")]
)
def test_plan_disaggregated_names_target_binding_aggregated(
    option: str, target: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*MEASURED, *MEAN_LOAD, option, target]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("disaggregated")
    assert f"much of its {named}" in shown


def test_plan_weights_conflicting_with_config_are_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {**known_models.KNOWN_CONFIGS["Llama-3.1-8B"], "quantization_config": {"quant_method": "fp8"}}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert main([*BY_NAME, "--model", str(path)]) == 0
    capsys.readouterr()
    assert main([*BY_NAME, "--model", str(path), "--weights", "bf16"]) == 1
    assert f"--weights: {path} sets quantization_config" in capsys.readouterr().err


@pytest.mark.parametrize("rows", [["0,100,50"], ["3,100,50", "3,100,50"]])
def test_plan_trace_without_rate_is_rejected(
    tmp_path: Path, rows: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "t.csv"
    path.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *rows]))
    assert main([*MEASURED, "--trace", str(path)]) == 1
    assert f"--trace: {path}: has no rate: it needs two requests at different times" in capsys.readouterr().err


def test_plan_suggested_slo_is_rounded_up_in_options() -> None:
    found = PlanFailure(Infeasible(Constraint.TTFT, Slo(0.95, 0.0885, 0.0501, tpot_s=0.05, e2e_s=10.41)), ("",))
    assert plan_output.infeasible_lines(found)[-1] == (
        "feasible targets: --ttft 89ms --ttft-per-k-token 51ms --tpot 50ms --e2e 11s"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["plan", "--no-simulation", "--tpot", "50ms", *MEAN_LOAD], "--model is required"),
        ([*MEASURED, *MEAN_LOAD, "--gpus-per-replica", "0"], "--gpus-per-replica: 0 must be from 1 to 64"),
        ([*MEASURED, *MEAN_LOAD, "--gpus-per-replica", "100000000"], "--gpus-per-replica: 100000000 must be from 1"),
        ([*MEASURED, *MEAN_LOAD, "--gpu-hour-cost", "1e308"], "--gpu-hour-cost: 1e+308 must be above 0 and at most"),
        (["plan", "--no-simulation", "--tpot", "50ms", "--model", "Qwen3-8B", *MEAN_LOAD], "--gpu is required"),
        ([*BY_NAME, "--model", "DeepSeek-V3"], "--model: DeepSeek-V3 cannot be planned"),
        ([*BY_NAME, "--gpu", "a100", "--model", "Qwen3-8B"], "--gpu: a100 may be A100-80G or A100-40G"),
        ([*BY_NAME, "--model", "mine"], "--model: 'mine' is no model known by name"),
        ([*BY_NAME, "--model", "/nowhere.json"], "--model: /nowhere.json: No such file"),
        ([*BY_NAME, "--model", "Qwen3-8B", "--gpus-per-replica", "3"], "--gpus-per-replica: 3 does not divide"),
        (
            ["plan", "--no-simulation", "--tpot", "50ms", "--gpu", "H900", "--model", "Qwen3-8B", *MEAN_LOAD],
            "--gpu: unknown GPU 'H900'",
        ),
        (
            [
                "plan",
                "--no-simulation",
                "--tpot",
                "50ms",
                "--gpu",
                "L4",
                "--model",
                "Llama-3.3-70B",
                "--gpus-per-replica",
                "2",
                *MEAN_LOAD,
            ],
            "leave no memory for the KV cache on 2 x L4",
        ),
        ([*MEASURED, *MEAN_LOAD, "--gpu", "H200"], "--gpu and --hardware"),
        (["plan", "--no-simulation", "--hardware", "h900", "--tpot", "50ms", *MEAN_LOAD], "profile 'h900'"),
        (["plan", "--no-simulation", "--hardware", "h200-8b", *MEAN_LOAD], "--ttft, --tpot or --e2e is required"),
        (
            ["plan", "--no-simulation", "--hardware", "h200-8b", "--ttft", "soon", *MEAN_LOAD],
            "--ttft: 'soon' is not a duration",
        ),
        (
            ["plan", "--no-simulation", "--hardware", "h200-8b", "--tpot", "0s", *MEAN_LOAD],
            "--tpot: 0s must be above 0",
        ),
        ([*MEASURED, *MEAN_LOAD, "--e2e", "500ms"], "--e2e: must be longer than --ttft"),
        ([*MEASURED, *MEAN_LOAD, "--e2e", "later"], "--e2e: 'later' is not a duration"),
        ([*MEASURED, *MEAN_LOAD, "--itl", "even"], "--itl: 'even' is not a duration"),
        (
            ["plan", "--no-simulation", "--hardware", "h200-8b", "--itl", "40ms", *MEAN_LOAD],
            "--ttft, --tpot or --e2e is required",
        ),
        ([*MEASURED, *MEAN_LOAD, "--percentile", "100"], "--percentile: 100"),
        ([*MEASURED, "--prompt-tokens", "9", "--output-tokens", "9"], "--rate is required, or --trace"),
        (
            [*MEASURED, *MEAN_LOAD[:2], "--prompt-tokens", "0", "--output-tokens", "9"],
            "--prompt-tokens: must be finite",
        ),
        ([*MEASURED, *MEAN_LOAD, "--prompt-sigma", "9"], "--prompt-sigma: must lie between"),
        ([*MEASURED, *MEAN_LOAD, "--cached-share", "1"], "--cached-share: must be 0 or more"),
        ([*MEASURED, *MEAN_LOAD, "--rate", "nan"], "--rate: nan"),
        ([*MEASURED, *MEAN_LOAD, "--trace", "t.csv"], "--prompt-tokens and --trace"),
        ([*MEASURED, "--trace", "t.csv", "--prompt-sigma", "0.6"], "--prompt-sigma and --trace"),
        ([*MEASURED, "--trace", "t.csv", "--output-sigma", "0.5"], "--output-sigma and --trace"),
        ([*MEASURED, "--trace", "/nowhere.csv"], "/nowhere.csv: No such file"),
        ([*MEASURED, *MEAN_LOAD, "--headroom", "1"], "--headroom: 1"),
        ([*MEASURED, *MEAN_LOAD, "--fabric-gb-per-s", "0"], "--fabric-gb-per-s: 0"),
        ([*MEASURED, *MEAN_LOAD, "--accepted-tokens", "9"], "--accepted-tokens: 9"),
        ([*MEASURED, *MEAN_LOAD, "--gpu-hour-cost", "0"], "--gpu-hour-cost: 0"),
        ([*MEASURED, *MEAN_LOAD, "--picture", "-"], "--picture -: must be a file"),
        ([*MEASURED, *MEAN_LOAD, "--picture", "/nowhere/c.svg"], "/nowhere/c.svg: No such file"),
    ],
)
def test_plan_invalid_input_is_reported(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 1
    assert said in capsys.readouterr().err


def test_plan_chart_never_overwrites_an_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = tmp_path / "own.json"
    own.write_text((Path(profiles.__file__).parent / "profiles" / "h200-8b.json").read_text())
    before = own.read_text()
    words = [
        "plan",
        "--no-simulation",
        "--hardware",
        str(own),
        "--ttft",
        "500ms",
        "--tpot",
        "50ms",
        *MEAN_LOAD,
        "--picture",
        str(tmp_path / "." / "own.json"),
    ]
    assert main(words) == 1
    assert "is also the file of --hardware" in capsys.readouterr().err
    assert own.read_text() == before


def test_plan_default_fabric_bandwidth_equals_question_default() -> None:
    assert build_parser().parse_args(MEASURED).fabric_gb_per_s * 1e9 == PlanRequest.bytes_per_s
