"""`plimsoll simulate` as it is typed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from plimsoll.cli import simulate
from plimsoll.cli.main import main
from plimsoll.core.slo import Slo
from plimsoll.core.types import Role
from plimsoll.sim import profiles
from plimsoll.sim.plant import Plant
from plimsoll.sim.result import RunResult
from tests import builders
from tests.sim import sim_harness

ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "operator")}


@pytest.fixture
def typed(tmp_path: Path) -> list[str]:
    """A call that works, without a policy: 200 requests against one serve tier."""
    lines = [f"{at_s},{prompt},{output}" for at_s, prompt, output in sim_harness.PoissonLoad(200, 20.0).draw()]
    (tmp_path / "t.csv").write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *lines]))
    manifest = builders.service(tiers={"serve": {"maxReplicas": 3}}, slo={"ttft": "1s", "tpot": "50ms"})
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(manifest))
    return [
        *("simulate", "--trace", str(tmp_path / "t.csv"), "--service", str(tmp_path / "s.yaml")),
        *("--hardware", "h200-8b"),
    ]


def test_simulate_json_has_summary_and_files_have_rows(
    typed: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {name: tmp_path / f"{name}.jsonl" for name in ("requests", "replicas", "windows")}
    out = [word for name, path in files.items() for word in (f"--{name}-out", str(path))]
    assert main([*typed, "--output", "json", "--start-up", "uniform:5,9", "--seed", "3", *out]) == 0
    output = json.loads(capsys.readouterr().out)
    assert (output["policy"], output["seed"], output["offered"]) == ("plimsoll", 3, 200)
    assert output["completed"] + output["shed"] == 200
    rows = [json.loads(line) for line in files["requests"].read_text().splitlines()]
    assert sum(one["outcome"] == "ok" for one in rows) == output["completed"]
    assert {json.loads(line)["tier"] for line in files["replicas"].read_text().splitlines()} == {"serve"}
    assert files["windows"].read_text() == ""


def test_simulate_json_has_every_documented_key(typed: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*typed, "--output", "json", "--clients", "honour", "--max-gpus", "2"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert {
        "policy", "seed", "offered", "admitted", "queued", "downgraded", "shed", "completed", "failed", "slo",
        "attainment_offered", "attainment_admitted", "windows_met", "p50_ttft_s", "p95_ttft_s", "p99_ttft_s",
        "p50_tpot_s", "p95_tpot_s", "p99_tpot_s", "itl_p99_s", "goodput_rps", "goodput_tokens_per_s", "gpu_hours",
        "mean_replicas", "reversals", "shed_share", "shed_work_ratio", "offered_tokens", "attainment_tokens",
        "infeasible_alone", "unfinished", "client_gone", "recovered", "retry_reservations", "windows", "wall_s",
    } <= output.keys()  # fmt: skip
    assert {"given", "first_ok", "second_ok"} <= output["retry_reservations"].keys()
    assert {"n", "passed"} <= output["windows"].keys()
    assert output["reversals"] == {"serve": [0]}


def test_simulate_html_is_one_page_with_chart_per_policy(
    typed: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*typed, "--output", "html", "--policy", "static:1", "--policy", "static:2"]) == 0
    page = capsys.readouterr().out
    assert page.startswith("<!doctype html>")
    assert not any(word in page for word in ("<script", "src=", "href="))
    svg = ElementTree.fromstring(page[page.index("<svg") : page.index("</svg>") + 6])
    words = [text.text or "" for text in svg.iter() if text.tag.endswith("text")]
    assert words.count("static:1") == words.count("static:2") == 5  # replicas, two latencies, refused, missed
    assert any(word.startswith("Replicas: serve") for word in words)
    assert "t.csv against s.yaml on h200-8b" in page
    assert "<td>attainment_offered</td>" in page


def test_simulate_html_of_one_policy_shows_desired_and_slo(
    typed: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*typed, "--output", "html"]) == 0
    page = capsys.readouterr().out
    assert ">desired<" in page
    assert ">target<" in page


def test_simulate_same_call_is_deterministic(typed: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for _ in range(2):
        assert main([*typed, "--output", "json", "--clients", "mixed", "--start-up", "uniform:5,9"]) == 0
        found.append({**json.loads(capsys.readouterr().out), "wall_s": 0.0})
    assert json.dumps(found[0]) == json.dumps(found[1])


def test_simulate_unknown_priority_is_reported(
    typed: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t.csv").write_text("arrival_s,prompt_tokens,output_tokens,priority\n0,9,2,urgent\n1,9,2,\n")
    assert main(typed) == 0
    assert "priority 'urgent' of 1 requests is not a class" in capsys.readouterr().err


def test_simulate_several_policies_are_columns(typed: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*typed, "--policy", "static:1", "--policy", "static:2", "--noise", "0", "--spread", "0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["policy", "static:1", "static:2"]
    [replicas] = [line.split() for line in lines if line.startswith("mean_replicas")]
    assert replicas == ["mean_replicas.serve", "1", "2"]
    reservations = [line for line in lines if line.startswith("retry_reservations.honoured.to_60_s.given")]
    assert [line.split()[1:] for line in reservations] == [["0", "0"]]
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize("args", [["--max-num-seqs=1"], ["--max-num-seqs=8", "--max_num_seqs", "1"]])
def test_simulate_manifest_engine_args_apply(
    args: list[str], typed: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _start_engines_with(tmp_path, args)
    assert main([*typed, "--policy", "static:1", "--output", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["p95_ttft_s"] > 10.0


@pytest.mark.parametrize("args", [["--max-num-seqs=many"], ["--max-num-batched-tokens", "1.5K"], ["--block_size=0"]])
def test_simulate_invalid_engine_args_are_rejected(
    args: list[str], typed: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _start_engines_with(tmp_path, args)
    assert main([*typed, "--policy", "static:1"]) == 1
    flag = args[0].partition("=")[0].replace("_", "-")
    assert f"spec.engine.args: {flag} " in capsys.readouterr().err


def test_simulate_automatic_max_model_len_is_accepted(typed: list[str], tmp_path: Path) -> None:
    _start_engines_with(tmp_path, ["--max-model-len=auto", "--max-num-batched-tokens=2k"])
    assert main([*typed, "--policy", "static:1"]) == 0


def _start_engines_with(path: Path, args: list[str]) -> None:
    manifest = yaml.safe_load((path / "s.yaml").read_text())
    manifest["spec"]["engine"] = {"args": args}
    (path / "s.yaml").write_text(yaml.safe_dump(manifest))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--policy", "magic"], "none of plimsoll"),
        (["--policy", "hindsigth"], "follower-frontier, hindsight"),
        (["--hardware", "h300"], "no hardware profile"),
        (["--initial", "1,2"], "--initial: must be SERVE"),
        (["--start-up", "soon"], "--start-up"),
        (["--rate-scale", "0"], "--rate-scale"),
        (["--rate-scale", "1e-9"], "--rate-scale: 0.000000001 leaves none of the 200 requests"),
        (["--from", "900"], "the trace has no request in this interval"),
        (["--spread", "1"], "--spread"),
        (["--noise", "-1"], "--noise"),
        (["--plant-scale", "0"], "--plant-scale"),
        (["--gateways", "0"], "--gateways"),
        (["--gateways", "1001"], "--gateways: must be at most 1,000"),
        (["--initial", "1001"], "--initial: must be SERVE as 1 whole number up to 1,000"),
        (["--initial", "9" * 5000], "--initial: must be SERVE as 1 whole number up to 1,000"),
        (["--max-gpus", "0"], "--max-gpus: must be at least 1"),
        (
            ["--max-gpus", "1", "--initial", "2"],
            "--max-gpus: 1 are too few for the initial 2 serve replicas of 1 GPU each of --policy plimsoll",
        ),
        (["--initial", "4"], "--initial: 4 serve replicas exceed the manifest's maxReplicas, 3"),
        (["--from", "-5"], "--from: -5 must not be below 0"),
        (["--seed", "-1"], "--seed: -1 must not be below 0"),
        (["--requests-out", "-"], "--requests-out -: must be a file"),
        (["--policy", "static:1", "--requests-out", "/dev/full"], "plimsoll: /dev/full: No space left on device"),
        (["--policy", "static:1", "--replicas-out", "/dev/full"], "plimsoll: /dev/full: No space left on device"),
        (["--service", "/nowhere"], "/nowhere: No such file"),
        (["--trace", "/nowhere.csv"], "/nowhere.csv: No such file"),
        (["--model-config", "/nowhere"], "/nowhere: No such file"),
        (["--requests-out", "/nowhere/r"], "/nowhere/r: No such file"),
        (["--policy", "static:1", "--policy", "static:2", "--windows-out", "w"], "need a single policy"),
    ],
)
def test_simulate_invalid_input_is_reported(
    typed: list[str], capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert main([*typed, *words]) == 1
    assert said in capsys.readouterr().err


def test_simulate_fallback_request_is_downgraded_and_missed(
    typed: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The fallback may stand in the same file: it is the other one that is simulated."""
    small = builders.service(name="small", tiers={"serve": {"maxReplicas": 1}})
    requested = yaml.safe_load((tmp_path / "s.yaml").read_text())
    requested["spec"]["admission"] = {"whenFull": "Downgrade", "fallback": {"name": "small"}}
    requested["spec"]["engine"] = {"args": ["--max-num-seqs=4"]}
    (tmp_path / "s.yaml").write_text(yaml.safe_dump_all([small, requested]))
    rows = tmp_path / "r.jsonl"
    assert main([*typed, "--output", "json", "--clients", "honour", "--requests-out", str(rows)]) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert "the fallback small is not simulated" in err
    assert document["downgraded"] > 0
    assert document["offered"] == document["admitted"] + document["downgraded"] == 200
    assert (document["shed"], document["retries"]) == (0, 0)
    ends = [json.loads(line) for line in rows.read_text().splitlines()]
    assert sum(one["outcome"] == "downgraded" for one in ends) == document["downgraded"]
    assert document["attainment_offered"] <= 1 - document["downgraded"] / 200


def test_simulate_malformed_manifest_is_rejected(
    typed: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for text, said in (
        (b"a: [", "is not valid YAML"),
        (b"a: 2001-99-99", "is not valid YAML"),
        (b"[" * 100_000, "is not valid YAML"),
        (b"\xff\xfe\xff", "is not UTF-8 text"),
        (b"kind: Pod\n", "must contain one InferenceService"),
        (b"kind: InferenceService\nmetadata:\n", "metadata: must contain the name of the service"),
        (b"kind: InferenceService\nmetadata: x\n", "metadata: must contain the name of the service"),
    ):
        (tmp_path / "s.yaml").write_bytes(text)
        assert main(typed) == 1
        assert f"s.yaml: {said}" in capsys.readouterr().err


def test_simulate_rows_of_several_policies_are_rejected_early(
    typed: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(simulate, "Simulator")
    out = ["--requests-out", str(tmp_path / "r.jsonl")]
    for words in (["--policy", "follower-frontier:runs=2"], ["--policy", "hindsight", "--policy", "static:1"]):
        assert main([*typed, *words, *out]) == 1
        assert "need a single policy" in capsys.readouterr().err
    assert not (tmp_path / "r.jsonl").exists()
    assert main([*typed, "--policy", "hindsight", "--requests-out", "/nowhere/r"]) == 1
    assert "/nowhere/r: No such file" in capsys.readouterr().err


def test_simulate_output_never_overwrites_inputs_or_outputs(
    typed: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By whatever name."""
    inputs = {
        "--trace": tmp_path / "t.csv",
        "--service": tmp_path / "s.yaml",
        "--hardware": tmp_path / "hw.json",
        "--start-up": tmp_path / "su.json",
        "--model-config": tmp_path / "mc.json",
    }
    inputs["--hardware"].write_bytes((profiles.PROFILE_FOLDER / "h200-8b.json").read_bytes())
    inputs["--start-up"].write_text("[5, 9]")
    inputs["--model-config"].write_text("{}")
    (tmp_path / "symbolic").symlink_to(tmp_path / "hw.json")
    (tmp_path / "hard").hardlink_to(tmp_path / "t.csv")
    before = {path: path.read_bytes() for path in inputs.values()}
    words = ["simulate", *(word for option, path in inputs.items() for word in (option, str(path)))]
    clashes = [("--windows-out", str(path.parent / "." / path.name), option) for option, path in inputs.items()]
    clashes += [("--requests-out", str(tmp_path / "hard"), "--trace")]
    clashes += [("--decisions-out", str(tmp_path / "symbolic"), "--hardware")]
    for out, name, of in clashes:
        assert main([*words, out, name]) == 1
        assert f"{out} {name}: is also the file of {of}" in capsys.readouterr().err
    same = str(tmp_path / "rows.jsonl")
    for _ in ("new", "there already"):
        assert main([*words, "--requests-out", same, "--replicas-out", str(tmp_path / "." / "rows.jsonl")]) == 1
        assert "is also the file of --requests-out" in capsys.readouterr().err
        Path(same).touch()
    assert {path: path.read_bytes() for path in inputs.values()} == before
    assert main([*words, "--policy", "static:1", "--requests-out", "/dev/null", "--replicas-out", "/dev/null"]) == 0


def test_simulate_rejected_run_leaves_existing_files(
    typed: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("kept\n")
    out = ["--start-up", "5", "--requests-out", str(rows)]
    for words in (
        ["--max-gpus", "1", "--initial", "3"],
        ["--policy", "static:1", "--replicas-out", "/nowhere/r"],
        ["--policy", "hindsight:runs=1,gpu-hours=0.000001"],  # which only its runs can tell
    ):
        assert main([*typed, *out, *words]) == 1
        assert capsys.readouterr().err.startswith("plimsoll: ")
        assert rows.read_text() == "kept\n"
    assert main([*typed, *out, "--policy", "static:1"]) == 0
    assert len(rows.read_text().splitlines()) == 200


def test_simulate_every_policy_is_validated_before_first_run(
    typed: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(simulate, "Simulator")
    manifest = yaml.safe_load((tmp_path / "s.yaml").read_text())
    manifest["spec"]["tiers"]["serve"]["gpus"] = 2
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(manifest))
    for policy, said in (
        ("static:2", "3 are too few for the initial 2 serve replicas of 2 GPUs each of --policy static:2"),
        ("clairvoyant:foo=1", "--policy clairvoyant:foo=1: unknown foo"),
        ("hindsight:windows=2", "--policy hindsight:windows=2: windows is a number"),
        ("follower-frontier:runs=0", "--policy follower-frontier:runs=0: runs is a whole number"),
    ):
        assert main([*typed, "--policy", "hindsight:runs=2", "--policy", policy, "--max-gpus", "3"]) == 1
        assert said in capsys.readouterr().err


def test_simulate_initial_ignored_by_policy_is_reported(typed: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*typed, "--policy", "static:1", "--initial", "2"]) == 0
    assert "--initial does not apply to --policy static:1" in capsys.readouterr().err
    assert main([*typed, "--policy", "static:2", "--initial", "2"]) == 0
    assert capsys.readouterr().err == ""


def test_simulate_full_disk_on_stdout_is_one_line_and_status(typed: list[str]) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-c", "import sys; from plimsoll.cli.main import main; sys.exit(main())"]
        done = subprocess.run(
            [*command, *typed, "--policy", "static:1"], stdout=full, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
        )
    assert (done.returncode, done.stderr) == (1, "plimsoll: standard output: No space left on device\n")


def test_simulate_long_run_reports_progress(
    typed: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulate, "_PROGRESS_INTERVAL_S", 0.0)
    assert main([*typed, "--policy", "static:1", "--policy", "static:2", "--output", "json"]) == 0
    output = capsys.readouterr()
    assert [one["policy"] for one in json.loads(output.out)] == ["static:1", "static:2"]
    lines = output.err.splitlines()
    assert lines[0].startswith("run 1, static:1: 0 of 200 requests, 0% of the time")
    assert lines[-1].startswith("run 2, static:2: 200 of 200 requests, 100% of the time")


def test_simulate_idle_hours_report_progress(
    typed: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulate, "_PROGRESS_INTERVAL_S", 0.0)
    (tmp_path / "t.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,9,2\n200,9,2\n")
    for policy in ("static:1", "plimsoll"):
        assert main([*typed, "--policy", policy]) == 0
        assert f"run 1, {policy}: 1 of 2 requests, 50% of the time\n" in capsys.readouterr().err


def test_simulate_search_writes_only_best_rows_and_runs_once(
    typed: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrote: list[bool] = []

    class Counted(RunResult):
        def __init__(self, plant: Plant, roles: Sequence[Role], slo: Slo | None, *more: Any) -> None:
            wrote.append(any(more[:2]))
            super().__init__(plant, roles, slo, *more)

    monkeypatch.setattr(simulate, "RunResult", Counted)
    search = [*typed, "--start-up", "5", "--output", "json", "--policy", "clairvoyant:runs=4,attainment=0.5"]
    assert main(search) == 0
    ran, output = len(wrote), json.loads(capsys.readouterr().out)
    assert ran <= 4
    assert not any(wrote)
    assert main([*search, "--requests-out", str(tmp_path / "r.jsonl")]) == 0
    assert wrote[ran:] == [False] * ran + [True]
    assert {**json.loads(capsys.readouterr().out), "wall_s": 0} == {**output, "wall_s": 0}
    assert len((tmp_path / "r.jsonl").read_text().splitlines()) == 200
