"""The input of load tools of other projects."""

from __future__ import annotations

import json
from pathlib import Path

from bench.hardware import dummy_models
from e2e.gpu import load_tools


def test_prompts_are_words_of_the_made_tokenizer(tmp_path: Path) -> None:
    """A text of other words would have no tokens, and GuideLLM would send nothing."""
    tokenizer = json.loads((dummy_models.write_model(tmp_path, "8b") / "tokenizer.json").read_text())
    prompts = load_tools.write_prompts(tmp_path / "prompts.jsonl", 3)
    rows = [json.loads(line) for line in prompts.read_text().splitlines()]

    words = [row["prompt"].split() for row in rows]
    assert [len(one) for one in words] == [load_tools.PROMPT] * 3
    assert set().union(*words) <= set(tokenizer["model"]["vocab"])
    assert words[0] != words[1]
