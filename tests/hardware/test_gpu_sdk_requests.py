"""The trial of SDK requests, where no GPU and no engine is needed: model, requests, rules, summaries."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from bench.gpu_engine import sdk_requests, vision_model
from bench.gpu_engine.sdk_requests import Counted, summarise
from plimsoll.core.routing.endpoint import Prompt
from plimsoll.core.types import MediaKind
from plimsoll.gateway.picture_tokens import PictureRule
from plimsoll.gateway.request_parser import ParsedRequest, parse_body


class Recorder:
    """A stand-in for the chat of the openai SDK: keeps the body."""

    def __init__(self) -> None:
        self.body: dict[str, Any] = {}
        self.chat = SimpleNamespace(completions=self)

    def create(self, **fields: Any) -> Any:
        self.body = fields
        message = SimpleNamespace(content='{"colour": "red", "count": 1}', tool_calls=None)
        usage = SimpleNamespace(prompt_tokens=7)
        return SimpleNamespace(usage=usage, model="m", choices=[SimpleNamespace(message=message)])


def test_rule_has_the_bounds_of_the_engines_arguments() -> None:
    assert sdk_requests.rule_of(()) == PictureRule()
    assert sdk_requests.rule_of(sdk_requests.BOUNDS) == PictureRule(least_pixels=50_176, most_pixels=401_408)


@pytest.mark.parametrize("name", ["text", "pictures", "tools", "tool results", "schema"])
def test_gateway_reads_the_request(name: str) -> None:
    sdk = Recorder()
    tokens, answered = sdk_requests.KINDS[name](sdk_requests.Sdks(sdk, None, []), Random(1), "m")
    found = parse_body(json.dumps(sdk.body).encode())
    assert isinstance(found, ParsedRequest)
    assert (tokens, answered, found.model) == (7, True, "m")
    assert (MediaKind.IMAGE in found.media_tokens) == (name == "pictures")
    assert found.pictures.others == 0


def test_requests_of_a_seed_are_equal() -> None:
    assert sdk_requests.picture(Random("a")) == sdk_requests.picture(Random("a")) != sdk_requests.picture(Random("b"))


def test_summary_judges_what_was_not_learned_from() -> None:
    def one(estimated: int, tokens: int) -> Counted:
        return Counted(ParsedRequest("m", Prompt(estimated, 1)), tokens)

    found = [one(100, 200)] * sdk_requests.LEARN + [one(100, 200)] * 9 + [one(100, 400)]
    summary = summarise(found)
    assert summary["first"] == [0.5, 0.6375]
    assert summary["learned"][0] < 0.2
    assert summary["ratios"].keys() == {"text"}


def test_model_has_the_tokens_that_its_template_writes(tmp_path: Path) -> None:
    pytest.importorskip("litellm")
    folder = vision_model.write_model(tmp_path / "model", tiny=True)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    config = json.loads((folder / "config.json").read_text())
    ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    template = (folder / "chat_template.jinja").read_text()
    for word in ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|image_pad|>"):
        assert word in template
        assert ids[word] not in tokenizer["model"]["vocab"].values()
    assert config["image_token_id"] == ids["<|image_pad|>"] < config["text_config"]["vocab_size"]
