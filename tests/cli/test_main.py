"""The program's verbs as a person meets them."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from plimsoll.cli.main import main

EXAMPLES = sorted((Path(__file__).parents[2] / "crds" / "examples").glob("*.yaml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_renders(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["render", "-f", str(path)]) == 0
    objects = [o for o in yaml.safe_load_all(capsys.readouterr().out) if o]
    assert {"Deployment", "Service", "PodDisruptionBudget", "NetworkPolicy"} <= {o["kind"] for o in objects}


def test_a_bad_manifest_is_one_line_and_a_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(EXAMPLES[0].read_text().replace("plimsoll.dev/v1alpha1", "plimsoll.dev/v9"))
    assert main(["render", "-f", str(path)]) == 1
    assert "apiVersion" in capsys.readouterr().err


def test_a_missing_file_is_one_line_and_a_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["render", "-f", "/nowhere.yaml"]) == 1
    assert "/nowhere.yaml" in capsys.readouterr().err


def test_no_verb_is_a_usage_error() -> None:
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == 2
