"""The program's verbs as a person meets them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from plimsoll.cli.main import main
from tests.apiserver import ApiServer

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "crds" / "examples").glob("*.yaml"))
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT / "operator")}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_render_every_example_yields_objects(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["render", "-f", str(path)]) == 0
    objects = [o for o in yaml.safe_load_all(capsys.readouterr().out) if o]
    assert {"Deployment", "Service", "PodDisruptionBudget", "NetworkPolicy"} <= {o["kind"] for o in objects}


def test_render_invalid_manifest_is_one_line_and_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(EXAMPLES[0].read_text().replace("plimsoll.dev/v1alpha1", "plimsoll.dev/v9"))
    assert main(["render", "-f", str(path)]) == 1
    assert "apiVersion" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["-f", "--config"])
@pytest.mark.parametrize(
    "held",
    [b"\xff\xfe\x00", b"a: [", b"- 1\n", b"3", b"kind: InferenceService\nmetadata: 3\n", b"a: *nowhere", b"[" * 5000],
)
def test_render_malformed_file_is_one_line_and_status(
    held: bytes, option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "odd.yaml"
    path.write_bytes(held)
    rest = [] if option == "-f" else ["-f", str(EXAMPLES[0])]
    assert main(["render", option, str(path), *rest]) == 1
    output = capsys.readouterr().err
    assert output.startswith("plimsoll: ")
    assert output.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        ["render", "-f", str(EXAMPLES[0])],
        [
            "plan",
            "--hardware",
            "h200-8b",
            "--tpot",
            "50ms",
            "--rate",
            "9",
            "--prompt-tokens",
            "99",
            "--output-tokens",
            "9",
            "--no-simulation",
        ],
    ],
    ids=["render", "plan"],
)
def test_full_disk_on_stdout_is_one_line_and_status(words: list[str]) -> None:
    command = [sys.executable, "-c", "import sys; from plimsoll.cli.main import main; sys.exit(main())", *words]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    assert (done.returncode, done.stderr) == (1, "plimsoll: standard output: No space left on device\n")


def test_render_names_the_document_that_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "several.yaml"
    path.write_text(EXAMPLES[0].read_text() + "\n---\nkind: HTTPRoute\n")
    assert main(["render", "-f", str(path)]) == 1
    found = capsys.readouterr()
    assert (found.out, found.err) == ("", "plimsoll: document 2: kind: must be InferenceService, not HTTPRoute\n")


def test_render_missing_file_is_one_line_and_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["render", "-f", "/nowhere.yaml"]) == 1
    assert "/nowhere.yaml" in capsys.readouterr().err


def test_main_without_command_is_usage_error() -> None:
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == 2


@pytest.mark.parametrize(
    "words",
    [
        ["explain"],
        ["status", "chat", "-A"],
        ["status", "-n", "team", "-A"],
        ["explain", "chat", "-A"],
        ["status", "a", "b"],
    ],
)
def test_main_conflicting_arguments_are_usage_error(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    assert "usage: plimsoll" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["status", "explain"])
def test_query_without_cluster_is_one_line_and_status(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "chat", "--kubeconfig", "/nowhere"]) == 1
    assert capsys.readouterr().err == "plimsoll: /nowhere: No such file or directory\n"


@pytest.mark.api
@pytest.mark.parametrize("verb", ["status", "explain"])
def test_query_reaches_the_cluster(verb: str, apiserver: ApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "absent", "-n", "void", "--kubeconfig", str(apiserver.kubeconfig)]) == 1
    assert capsys.readouterr().err in (
        "plimsoll: no InferenceService absent in namespace void; the namespace has none\n",
        "plimsoll: the cluster has no InferenceService CRD: Plimsoll is not installed\n",
    )


def test_query_imports_neither_controllers_nor_api_models() -> None:
    look = "import sys, plimsoll.cli.main, plimsoll.cli.explain, plimsoll.cli.status; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True, env=ENVIRONMENT)
    heavy = {"kopf", "numpy", "uvloop", "httpx", "plimsoll.controllers", "plimsoll.api.v1alpha1"}
    assert heavy.isdisjoint(loaded.stdout.split())


def test_render_closed_pipe_is_silent() -> None:
    program = "import sys; from plimsoll.cli.main import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "render", "-f", str(EXAMPLES[0])]
    reader, writer = os.pipe()
    os.close(reader)
    try:
        ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False, env=ENVIRONMENT)
    finally:
        os.close(writer)
    assert ended.stderr == ""
    assert ended.returncode == 1
