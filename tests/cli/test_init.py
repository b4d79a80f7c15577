"""`plimsoll init` prints a manifest that the operator takes, with what the plan for the same options recommends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from plimsoll.cli.init import complete
from plimsoll.cli.main import build_parser, main
from plimsoll.sim.errors import BadInput

SLO = ["--ttft", "500ms", "--tpot", "50ms"]
LOAD = ["--rate", "24", "--prompt-tokens", "1200", "--output-tokens", "220", "--no-simulation"]
KNOWN = ["--model", "Qwen/Qwen3-8B", "--gpu", "H200", *SLO, *LOAD]


def manifest_of(words: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["init", *words]) == 0
    return dict(yaml.safe_load(capsys.readouterr().out))


def test_init_manifest_has_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *KNOWN, "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert main(["init", *KNOWN]) == 0
    text = capsys.readouterr().out
    assert text.startswith("# Plan for 24 req/s: 2 x 1 GPU serve on H200; p95 TTFT 120 ms, p95 TPOT 13.3 ms.\n")
    manifest = yaml.safe_load(text)
    assert manifest["metadata"] == {"name": "qwen3-8b"}
    assert manifest["spec"] == {
        "model": {"uri": "hf://Qwen/Qwen3-8B"},
        "slo": {"ttft": "500ms", "tpot": "50ms"},
        "tiers": {"serve": {"minReplicas": 1, "maxReplicas": planned["tiers"]["serve"]["replicas"] + 1, "gpus": 1}},
    }
    path = tmp_path / "service.yaml"
    path.write_text(text)
    assert main(["render", "-f", str(path)]) == 0


@pytest.mark.parametrize(("given", "known"), [("h100", "H100-SXM"), ("l4", "L4"), ("b200", "B200")])
def test_init_gpu_is_found_without_its_form_factor(given: str, known: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "--model", "Qwen/Qwen3-8B", "--gpu", given, *SLO, *LOAD]) == 0
    assert f" serve on {known}; " in capsys.readouterr().out


def test_init_options_reach_their_fields(capsys: pytest.CaptureFixture[str]) -> None:
    label = "nvidia.com/gpu.product=NVIDIA-H200"
    words = ["chat", "-n", "team", "--uri", "pvc://models/chat", "--percentile", "90", "--node-selector", label]
    manifest = manifest_of([*words, *KNOWN, "--weights", "fp8", "--kv-cache", "fp8", "--itl", "60ms"], capsys)
    assert manifest["metadata"] == {"name": "chat", "namespace": "team"}
    spec = manifest["spec"]
    assert spec["model"] == {"uri": "pvc://models/chat"}
    assert spec["slo"] == {"percentile": 90, "ttft": "500ms", "tpot": "50ms", "itl": "60ms"}
    assert spec["engine"]["args"][:1] == ["--max-num-batched-tokens"]
    assert spec["engine"]["args"][-4:] == ["--quantization", "fp8", "--kv-cache-dtype", "fp8"]
    assert spec["tiers"]["serve"]["pod"] == {"nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-H200"}}


def test_init_mixture_gets_the_automatic_tuning(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--uri", "hf://Qwen/Qwen3-30B-A3B", "--gpu", "H200", *SLO, *LOAD]
    assert manifest_of(words, capsys)["spec"]["engine"] == {"tuning": "Auto"}


def test_init_measured_profile_needs_only_the_location(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--uri", "file:///models/8b", "--hardware", "h200-8b", *SLO, *LOAD]
    manifest = manifest_of(words, capsys)
    assert manifest["metadata"]["name"] == "llm-8b"
    assert manifest["spec"]["tiers"]["serve"]["gpus"] == 1


def asker(answers: list[str]) -> Any:
    remaining: Iterator[str] = iter(answers)
    return lambda _: next(remaining)


def test_init_asks_what_the_options_do_not_say() -> None:
    arguments = build_parser().parse_args(["init", "--tpot", "40ms"])
    complete(arguments, asker(["hf://Qwen/Qwen3-8B\n", "H200\n", "24\n", " 1200 \n", "220\n"]))
    assert (arguments.uri, arguments.model, arguments.gpu) == ("hf://Qwen/Qwen3-8B", "Qwen/Qwen3-8B", "H200")
    assert (arguments.ttft, arguments.tpot) == (None, "40ms"), "one target is enough"
    assert (arguments.rate, arguments.prompt_tokens, arguments.output_tokens) == (24.0, 1200.0, 220.0)
    arguments = build_parser().parse_args(["init", "--trace", "requests.csv"])
    complete(arguments, asker(["pvc://models/chat", "Qwen3-8B", "H200", "", "30ms"]))
    assert (arguments.model, arguments.ttft, arguments.tpot) == ("Qwen3-8B", "500ms", "30ms")


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ([""], "no answer: location of the weights"),
        (["hf://Qwen/Qwen3-8B", "H200", "", "", "many"], "requests/s: 'many' is not a number"),
    ],
)
def test_init_bad_answer_is_named(answers: list[str], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        complete(build_parser().parse_args(["init"]), asker(answers))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (LOAD, "--uri is required"),
        (["--uri", "ftp://x/y", "--model", "Qwen3-8B", "--gpu", "H200", *SLO, *LOAD], "scheme"),
        (["--uri", "hf://a/unknown", "--gpu", "H200", *SLO, *LOAD], "no model known by name"),
        ([*KNOWN, "--node-selector", "gpu"], "must be LABEL=VALUE"),
        ([*KNOWN, "--tpot", "0.1ms"], "TPOT"),
    ],
)
def test_init_bad_option_is_one_message(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", *words]) == 1
    output = capsys.readouterr()
    assert message in output.err
    assert output.out == ""


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--uri", "Qwen/Qwen3-8B", "--gpu", "H200"], '--uri: "Qwen/Qwen3-8B" has no scheme; use hf://ORG/REPO'),
        (["--uri", "hf://Qwen"], '--uri: "hf://Qwen" must have exactly an organisation and a repository'),
        ([*KNOWN, "-n", "Team A"], "--namespace: Team A must be the name of a namespace: lower-case letters, "),
        (["Bad Name", *KNOWN], 'metadata.name: "Bad Name" must begin with a lower-case letter'),
    ],
)
def test_init_names_the_option_that_is_wrong(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", *words]) == 1
    found = capsys.readouterr()
    assert found.err.startswith(f"plimsoll: {says}")
    assert found.out == ""


def test_options_are_not_abbreviated(capsys: pytest.CaptureFixture[str]) -> None:
    """`--name chat` would otherwise be the namespace."""
    with pytest.raises(SystemExit):
        main(["init", "--name", "chat", *KNOWN])
    assert "unrecognized arguments: --name" in capsys.readouterr().err
