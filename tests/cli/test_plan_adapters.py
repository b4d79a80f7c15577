"""LoRA adapters in `plimsoll plan`: their memory, and the options that name them."""

from __future__ import annotations

import json

import pytest

from plimsoll.cli.main import main
from tests.cli.test_plan import BY_NAME, MEAN_LOAD, MEASURED


def test_plan_adapters_take_memory_of_the_kv_cache(capsys: pytest.CaptureFixture[str]) -> None:
    """64 places of rank 64 on an 8B: 36 layers of 75,776 inputs and outputs, in 16 bits, are 20.8 GiB."""
    words = [*BY_NAME, "--model", "Qwen3-8B", "--gpus-per-replica", "1"]
    held = []
    for lora in ([], ["--max-loras", "64", "--max-lora-rank", "64"]):
        assert main([*words, *lora, "--json"]) == 0
        held.append(json.loads(capsys.readouterr().out)["tiers"]["serve"]["kv_tokens"])
    assert held[0] - held[1] == pytest.approx(2 * 64 * 64 * 36 * 75_776 / 147_456, abs=1)
    assert main([*words, "--max-loras", "4"]) == 0
    shown = capsys.readouterr().out
    assert "engine: {lora: {maxLoras: 4, maxLoraRank: 16}" in shown
    assert "without adapters" in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "Qwen3-8B", "--max-loras", "0"], "--max-loras: 0 must be from 1 to 256"),
        (["--model", "Qwen3-8B", "--max-lora-rank", "8"], "--max-lora-rank needs --max-loras"),
        (
            ["--model", "Qwen3-8B", "--max-loras", "4", "--max-lora-rank", "9"],
            "--max-lora-rank: 9 must be one of 8, 16,",
        ),
        (["--model", "Qwen3-30B-A3B", "--max-loras", "4"], "mixture of experts"),
        (["--model", "Llama-3.1-8B", "--max-loras", "256", "--max-lora-rank", "512"], "256 adapters of rank 512"),
    ],
)
def test_plan_rejects_adapters_that_do_not_fit(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*BY_NAME, "--gpus-per-replica", "1", *words]) == 1
    assert message in capsys.readouterr().err


def test_plan_profile_has_its_adapters_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*MEASURED, *MEAN_LOAD, "--max-loras", "4"]) == 1
    assert "--max-loras and --hardware are mutually exclusive" in capsys.readouterr().err
