"""What lies in the repository of the runs on GPUs still says what docs and profiles say of it."""

import gzip
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from bench.hardware import (
    archive,
    compare_pd,
    dummy_models,
    fit_step_model,
    self_benchmarks,
    summarise,
    traces,
)
from plimsoll.core.engine_model import roofline
from plimsoll.core.planning import engine_settings
from plimsoll.engines import vllm
from plimsoll.sim import profile

DATA = Path(fit_step_model.__file__).parent / "data"
PROFILES = Path(__file__).parents[2] / "operator" / "plimsoll" / "sim" / "profiles"


@pytest.mark.parametrize(
    ("model", "runs"),
    [
        ("30b-a3b", 5),
        ("h100-30b-a3b", 4),
        *((name, 6) for name in ("8b", "h100-8b", "30b-a3b-graphs", "8b-fp8", "8b-fp8-graphs")),
    ],
)
def test_recorded_runs_used_predicted_traces(model: str, runs: int) -> None:
    found = summarise.read(DATA / model)["rates"]
    assert len(found) == runs
    assert all(one["ok"] == one["sent"] for one in found)


def test_dense_model_met_slo_at_capacity_and_not_beyond() -> None:
    at, beyond = (summarise.read(DATA / "8b")["rates"][number]["in_promise"] for number in (4, 5))
    assert round(at, 3) == 0.987
    assert round(beyond, 3) == 0.481


@pytest.mark.parametrize(
    ("run", "kept", "lost"),
    [
        ("30b-a3b", 0.958, 0.813),
        ("30b-a3b-graphs", 1.0, 0.944),
        ("8b-fp8", 1.0, 0.734),
        ("8b-fp8-graphs", 1.0, 0.365),
    ],
)
def test_prediction_failure_rates_match_recorded_runs(run: str, kept: float, lost: float) -> None:
    """The last rate at which 95 % were in promise, and the next one: below the line that was predicted."""
    shares = [round(one["in_promise"], 3) for one in summarise.read(DATA / run)["rates"]]
    last = max(number for number, share in enumerate(shares) if share >= 0.95)
    assert shares[last : last + 2] == [kept, lost]
    document = json.loads((DATA / run / "prediction.json").read_text())
    assert document["shares_of_line"][last + 1] < 1
    assert document["from"]["data sheet"]["rates"][last + 1]["simulator"]["in_promise"] == 1


def test_cuda_graphs_to_budget_remove_moe_step_jump() -> None:
    observed = {}
    for run in ("30b-a3b", "30b-a3b-graphs"):
        alone = json.loads((DATA / run / "result.json").read_text())["alone"]
        observed[run] = {one["prompt"]: one["ttft_s"] for one in alone}
    before, after = observed["30b-a3b"], observed["30b-a3b-graphs"]
    assert before[1024] > 2.5 * after[1024]
    for tokens in (512, 8192, 16384):
        assert after[tokens] == pytest.approx(before[tokens], rel=0.03)


def test_planned_cuda_graphs_equal_measured_ones() -> None:
    without, with_ = (json.loads((DATA / run / "result.json").read_text()) for run in ("30b-a3b", "30b-a3b-graphs"))
    found = engine_settings.choose_cuda_graphs(with_["about"]["limits"]["token_budget"], mixture=True)
    assert found is not None
    assert " ".join(found.args) in with_["command"]
    assert vllm.CUDA_GRAPH_SIZES not in without["command"]
    ttft_s, init_s, tokens = (
        [read(one) for one in (without, with_)]
        for read in (
            lambda one: next(alone["ttft_s"] for alone in one["alone"] if alone["prompt"] == 1024),
            lambda one: dict(one["about"]["phases"])["init"],
            lambda one: one["about"]["limits"]["kv_tokens"],
        )
    )
    assert (
        f"{ttft_s[1] * 1e3:.0f} ms for 1,024 tokens with such graphs and {ttft_s[0] * 1e3:.0f} without" in found.reason
    )
    assert f"{init_s[1] - init_s[0]:.0f} s of its start" in found.reason
    assert f"{1 - tokens[1] / tokens[0]:.1%} of its cache".replace("%", " %") in found.reason


def test_fp8_graph_predictions_are_fits_of_previous_run() -> None:
    """`launches`: with a term for steps of more tokens than vLLM captures by itself, left out in what was said."""
    steps = summarise.read(DATA / "8b-fp8")["steps"]
    laws = {"as-measured": steps["fits"]["0"][0]["law"], "launches": steps["law_with_launches_beyond_graphs"]}
    document = json.loads((DATA / "8b-fp8-graphs" / "prediction.json").read_text())["from"]
    for name, law in laws.items():
        if name == "launches":
            assert round(law["anypre"] * 1e3, 1) == 2.8
            law["anypre"] = 0.0
        assert list(document[name]["law"].values()) == pytest.approx(list(law.values()), rel=1e-3)
    assert [round(document[name]["line_rps"], 1) for name in ("as-measured", "launches")] == [29.5, 30.3]


def test_larger_cuda_graphs_gave_fp8_8b_no_capacity() -> None:
    """So a plan advises none to a dense model."""
    shares, first_s, over, commands = {}, {}, {}, {}
    for run in ("8b-fp8-graphs", "8b-fp8-default"):
        result = json.loads((DATA / run / "result.json").read_text())
        shares[run] = [round(one["in_promise"], 3) for one in summarise.read(DATA / run)["rates"]]
        first_s[run] = next(one["ttft_s"] for one in result["alone"] if one["prompt"] == 1024)
        over[run] = summarise.read(DATA / run)["steps"]["over_data_sheet"]["32"]
        commands[run] = result["command"]
    graphs, default = "8b-fp8-graphs", "8b-fp8-default"
    found = engine_settings.choose_cuda_graphs(8192, mixture=True)
    assert found is not None
    assert " ".join(found.args) in commands[graphs]
    assert vllm.CUDA_GRAPH_SIZES not in commands[default]
    assert shares[graphs] == [1.0, 1.0, 1.0, 0.365, 0.13, 0.091]
    assert shares[default] == [1.0, 1.0, 1.0, 0.398, 0.157, 0.101]
    assert round(first_s[graphs] / first_s[default], 2) == 0.95
    assert over[graphs] >= over[default]
    assert engine_settings.choose_cuda_graphs(8192, mixture=False) is None


@pytest.mark.parametrize(
    ("run", "share"),
    [
        ("8b", 0.97),
        ("30b-a3b", 1.33),
        ("30b-a3b-graphs", 1.11),
        ("8b-fp8", 1.18),
        ("8b-fp8-default", 1.21),
        ("8b-fp8-graphs", 1.22),
        ("8b-fp8-again", 1.21),
    ],
)
def test_step_time_deviation_from_data_sheet_matches_docs(run: str, share: float) -> None:
    assert round(summarise.read(DATA / run)["steps"]["over_data_sheet"]["32"], 2) == share


@pytest.mark.parametrize(
    ("model", "run", "least", "name"),
    [
        ("8b", "8b", 0, "h200-8b-launcher"),
        ("8b", "h100-8b", 0, "h100-8b"),
        ("30b-a3b", "30b-a3b", 32, "h200-30b-a3b"),
    ],
)
def test_profiles_equal_fits_of_step_logs(model: str, run: str, least: int, name: str) -> None:
    folder, config = DATA / run, dummy_models.CONFIGS[model]
    found = summarise.read(folder)["steps"]["fits"][str(least)]
    shape = roofline.model_shape(config)
    own = fit_step_model.profile_document(folder, found, round(shape.kv_bytes_per_token), shape.layers)
    kept = json.loads((PROFILES / f"{name}.json").read_text())
    for key in fit_step_model.COEFFICIENTS:
        assert own[key] == pytest.approx(kept[key], rel=1e-3)
    assert {key: own[key] for key in own if key not in (*fit_step_model.COEFFICIENTS, "hot")} == {
        key: kept[key] for key in kept if key not in (*fit_step_model.COEFFICIENTS, "hot")
    }
    assert profile.load(name).kv_tokens == own["kv_tokens"]


def test_moe_self_benchmark_overestimates_sequence_cost() -> None:
    found = self_benchmarks.prior_models(DATA / "30b-a3b")
    steps = summarise.read(DATA / "30b-a3b")["steps"]["fits"]["32"][0]["law"]
    assert found["self_benchmark"].sequence_s > 20 * steps["dec"]
    assert found["data sheet"].base_s == pytest.approx(steps["base"], rel=0.1)


def pairs(folder: str) -> dict[str, Any]:
    return {one["run"]: one for one in summarise.read(DATA / folder)["pairs"]}


def test_compare_pd_assesses_transfers_from_counters(capsys: pytest.CaptureFixture[str]) -> None:
    assert compare_pd.main([str(DATA / "pair-own"), "--profile", "h100-8b"]) == 0
    printed = capsys.readouterr()
    assert "00.pd.chat2: does not pay: moving a prompt token takes 673 us" in printed.err
    stored = (DATA / "pair-own" / "summary.md").read_text()
    assert [line for line in printed.out.splitlines() if line not in stored] == []


def test_transfers_paid_on_one_host() -> None:
    found = pairs("pair")
    assert [round(value, 1) for value in found["1.pd.chat24"]["figures"]["ttft_ms"]] == [126.6, 348.2]
    assert found["1.pd.chat24"]["verdict"].startswith("pays: moving a prompt token takes 6.08 us")
    assert found["3.pd.chat36.1200"]["verdict"].endswith("5288 preemptions")


@pytest.mark.parametrize(
    ("folder", "said", "gb_per_s", "share"),
    [
        ("pair-shared", "pays: moving a prompt token takes 2.4 us", 56.0, 1.0),
        ("pair-own", "does not pay: moving a prompt token takes 673 us", 0.2, 0.225),
    ],
)
def test_nvlink_needs_one_process_namespace(folder: str, said: str, gb_per_s: float, share: float) -> None:
    first = pairs(folder)["00.pd.chat2"]
    assert first["verdict"].startswith(said)
    counted = first["decode_engine"]
    assert counted["bytes"] / counted["transfer_s"] / 1e9 == pytest.approx(gb_per_s, rel=0.01)
    assert round(first["figures"]["0.5/0.05"], 3) == share


def test_smaller_budget_met_itl_target_and_pd_did_not() -> None:
    found = pairs("pair-alone")
    shares = {name: round(one["figures"]["gap"], 3) for name, one in found.items()}
    kept = {name: shares[name] for name in ("02.agg.chat36", "05.pd.chat36", "12.agg.chat36.1024")}
    assert kept == {"02.agg.chat36": 0.057, "05.pd.chat36": 0.0, "12.agg.chat36.1024": 0.923}
    assert shares["04.pd.chat30"] == 0.874 < shares["11.agg.chat30.1024"]
    assert found["03.pd.chat24"]["itl_p99_s"] == pytest.approx(0.0113, rel=0.02)


def test_pair_alone_runs_used_predicted_traces() -> None:
    document = json.loads((DATA / "pair-alone" / "prediction.json").read_text())["runs"]
    for one, (run, found) in zip(document, pairs("pair-alone").items(), strict=True):
        trace = DATA / found["trace"]
        assert run.startswith(one["run"])
        assert hashlib.sha256(trace.read_bytes()).hexdigest() == one["sha256"]
        assert found["requests"] == len(traces.read(trace))


@pytest.mark.parametrize(
    ("folder", "engine", "run", "excess_ms", "longest_ms"),
    [
        ("pair-alone", "d", "06.pd.chat24.900", 8.8, 31.6),
        ("pair-alone", "a0", "00.agg.chat24", -1.0, 20.4),
        ("pair-alone-graphs", "d", "01.pd.chat24.900", -0.5, 17.7),
    ],
)
def test_decode_engine_beyond_cuda_graphs_is_slower_than_model(
    folder: str, engine: str, run: str, excess_ms: float, longest_ms: float
) -> None:
    found = summarise.read(DATA / folder)["long_steps"][engine][run][1]
    assert (round(found["excess_s"] * 1e3, 1), round(found["longest_s"] * 1e3, 1)) == (excess_ms, longest_ms)


@pytest.mark.parametrize(
    ("folder", "predicted", "decode_profile"),
    [
        ("h100-8b-gate", True, summarise.Profiles.decode),
        ("h100-30b-a3b", True, summarise.Profiles.decode),
        ("pair-own", False, "h100-8b"),
    ],
)
def test_summary_equals_figures_of_the_archived_raw_run(
    folder: str, predicted: bool, decode_profile: str, tmp_path: Path
) -> None:
    words = [str(DATA / folder), "--out", str(tmp_path), "--profile", decode_profile]
    assert summarise.main([*words, *(["--prediction", str(DATA / folder)] if predicted else [])]) == 0
    assert summarise.read(tmp_path) == approximately(summarise.read(DATA / folder))
    assert (tmp_path / "result.json").read_bytes() == (DATA / folder / "result.json").read_bytes()


def approximately(value: Any) -> Any:
    """Numbers within what another machine's linear algebra changes."""
    if isinstance(value, dict):
        return {key: approximately(item) for key, item in value.items()}
    if isinstance(value, list):
        return [approximately(item) for item in value]
    return pytest.approx(value, rel=1e-3, abs=1e-9) if isinstance(value, float) else value


def test_summarise_of_another_trace_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prediction = tmp_path / "said"
    shutil.copytree(DATA / "h100-30b-a3b", prediction)
    (prediction / "run0.csv").write_text((DATA / "h100-30b-a3b" / "run1.csv").read_text())
    words = [str(DATA / "h100-30b-a3b"), "--prediction", str(prediction), "--out", str(tmp_path / "out")]
    assert summarise.main(words) == 1
    assert "run0.csv is not the trace that was predicted" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_data_folder_stays_small() -> None:
    assert sum(path.stat().st_size for path in DATA.rglob("*") if path.is_file()) < 3_000_000


def test_missing_counter_counts_as_zero() -> None:
    assert set(compare_pd.transfer_counters("# nothing\n").values()) == {0.0}
    text = 'vllm:num_preemptions_total{engine="0"} 3.0\nvllm:num_preemptions_total{engine="1"} 4.0\n'
    assert compare_pd.transfer_counters(text)["preempted"] == 7.0


def test_archive_suffices_for_tables_and_is_deterministic(tmp_path: Path) -> None:
    path = tmp_path / "seen"
    path.mkdir()
    row: dict[str, object] = {
        "row": 0,
        "at_s": 1.0,
        "late_s": 0.000123456,
        "prompt": 5,
        "output": 3,
        "first_s": 0.2,
        "last_s": 0.3,
    }
    row |= {"gap_s": None, "ok": True, "status": 200, "tokens": 3}
    (path / "run0.requests.json").write_text(json.dumps({"start": 1.0, "requests": [row]}))
    (path / "engine.steps.csv").write_text("t_sched,t_out\n1,2\n")
    (path / "gpu.csv").write_text("timestamp, index, sm, power, util\n2026/11/22 08:00:00.000, 0, 1980, 300, 99\n")
    (path / "d.metrics.txt").write_text("# HELP x\nvllm:nixl_xfer_time_seconds_sum 1.0\nvllm:other 2.0\n")
    (path / "clock.json").write_text("{}")
    (path / "result.json").write_text('{"command": "vllm serve /home/me/run1/models/8b --port 8000"}')
    for name in ("one", "two"):
        assert archive.main([str(path), str(tmp_path / name)]) == 0
    one, two = (tmp_path / name / "run0.requests.json.gz" for name in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()
    assert archive.read_run(one)["requests"][0]["late_s"] == 0.00012
    assert gzip.decompress((tmp_path / "one" / "engine.steps.csv.gz").read_bytes()).startswith(b"t_sched")
    assert (tmp_path / "one" / "d.metrics.txt").read_text() == "vllm:nixl_xfer_time_seconds_sum 1.0\n"
    assert "99" not in (tmp_path / "one" / "gpu.csv").read_text()
    assert (tmp_path / "one" / "result.json").read_text() == '{"command": "vllm serve OUT/models/8b --port 8000"}'


def test_model_folder_tokenizer_matches_vocabulary_size(tmp_path: Path) -> None:
    folder = dummy_models.write_model(tmp_path, "8b")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    assert len(tokenizer["model"]["vocab"]) == dummy_models.CONFIGS["8b"]["vocab_size"]
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 32


def test_recorded_arrivals_are_readable() -> None:
    assert [len(traces.read(DATA / f"chat{rate}.csv")) for rate in (24, 36)] == [1058, 1594]
