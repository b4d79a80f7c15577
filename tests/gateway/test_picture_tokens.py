"""Tokens of pictures by model family, against the numbers of the models' own processors."""

from __future__ import annotations

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.core.types import MediaKind
from plimsoll.gateway.picture_tokens import DEFAULT_RULE, PictureFamily, PictureRule, Pictures, family_of
from plimsoll.gateway.request_parser import ParsedRequest, parse_body
from tests.gateway.kube_objects import build_catalog, service
from tests.gateway.test_media_parts import png


@pytest.mark.parametrize(
    ("family", "size", "tokens"),
    [
        (PictureFamily.QWEN_28, (1280, 720), 46 * 26),
        (PictureFamily.QWEN_28, (640, 480), 23 * 17),
        (PictureFamily.QWEN_28, (4000, 3000), 143 * 107),
        (PictureFamily.QWEN_28, (8000, 6000), 147 * 110),  # scaled down
        (PictureFamily.QWEN_28, (10, 10), 2 * 2),  # scaled up
        (PictureFamily.QWEN_32, (1280, 720), 40 * 22),  # 22.5 is rounded to the even number
        (PictureFamily.QWEN_32, (100, 100), 8 * 8),
        (PictureFamily.QWEN_32, (300, 900), 9 * 28),
        (PictureFamily.GEMMA, (4000, 30), 256),
        (PictureFamily.LLAMA, (336, 336), 144),  # one tile has no picture of the whole
        (PictureFamily.LLAMA, (672, 336), 144 * 3),
        (PictureFamily.LLAMA, (1344, 1344), 144 * 17),  # 4 x 4 tiles
        (PictureFamily.LLAMA, (100_000, 100_000), 144 * 17),
        (PictureFamily.INTERNVL, (448, 448), 256),
        (PictureFamily.INTERNVL, (896, 448), 256 * 3),
        (PictureFamily.INTERNVL, (1600, 900), 256 * 9),  # no grid has 16:9; 2:1 is the closest, and 4 x 2 is filled
        (PictureFamily.INTERNVL, (1344, 1344), 256 * 10),
        (PictureFamily.PIXTRAL, (1024, 1024), 64 * 64 + 64),
        (PictureFamily.PIXTRAL, (2048, 1024), 64 * 32 + 32),
        (PictureFamily.MISTRAL, (1540, 1540), 55 * 55 + 55),
    ],
)
def test_picture_has_the_tokens_of_its_family(family: PictureFamily, size: tuple[int, int], tokens: int) -> None:
    assert PictureRule(family).tokens(*size) == tokens


@pytest.mark.parametrize(
    ("uri", "family"),
    [
        ("hf://Qwen/Qwen2.5-VL-7B-Instruct", PictureFamily.QWEN_28),
        ("hf://Qwen/Qwen3-VL-8B-Instruct", PictureFamily.QWEN_32),
        ("hf://google/gemma-3-12b-it", PictureFamily.GEMMA),
        ("hf://meta-llama/Llama-4-Scout-17B-16E-Instruct", PictureFamily.LLAMA),
        ("hf://OpenGVLab/InternVL3-8B", PictureFamily.INTERNVL),
        ("hf://mistralai/Pixtral-12B-2409", PictureFamily.PIXTRAL),
        ("hf://mistralai/Mistral-Small-3.2-24B-Instruct-2506", PictureFamily.MISTRAL),
        ("pvc://models/llama-3-8b", PictureFamily.QWEN_28),
        ("", PictureFamily.QWEN_28),
    ],
)
def test_family_is_found_in_the_models_location(uri: str, family: PictureFamily) -> None:
    assert family_of(uri) is family


@given(st.sampled_from(PictureFamily), st.integers(1, 100_000), st.integers(1, 100_000))
def test_tokens_are_bounded_for_any_size(family: PictureFamily, width: int, height: int) -> None:
    assert 1 <= PictureRule(family).tokens(width, height) <= 16_384


def test_request_has_the_tokens_of_its_services_family() -> None:
    urls = [f"data:image/png;base64,{base64.b64encode(png(1280, 720)).decode()}", "https://example.com/a.png"]
    content = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    body = {"model": "m", "messages": [{"role": "user", "content": [*content, {"type": "text", "text": "x" * 400}]}]}
    found = parse_body(json.dumps(body).encode())
    assert isinstance(found, ParsedRequest)
    assert found.pictures == Pictures(((1280, 720),), 1)
    assert found.media_tokens == {MediaKind.IMAGE: 46 * 26 + 1024}
    gemma = found.for_model(PictureRule(PictureFamily.GEMMA))
    assert gemma.media_tokens == {MediaKind.IMAGE: 512}
    assert found.prompt.tokens - gemma.prompt.tokens == 46 * 26 + 1024 - 512
    assert found.for_model(DEFAULT_RULE) is found


@pytest.mark.parametrize(
    ("args", "tokens"),
    [
        ((), 1369),
        (("--mm-processor-kwargs", '{"max_pixels": 401408}'), 22 * 22),
        (('--mm_processor_kwargs={"min_pixels": 3136, "max_pixels": 401408}',), 22 * 22),
        (("--mm-processor-kwargs", '{"size": {"shortest_edge": 3136, "longest_edge": 401408}}'), 22 * 22),
        (("--mm-processor-kwargs", '{"max_pixels": 1, "images_kwargs": {"max_pixels": 401408}}'), 22 * 22),
        (("--mm-processor-kwargs.max_pixels", "401408"), 22 * 22),
        (("--mm-processor-kwargs.size.longest_edge=401408", "--seed", "1"), 22 * 22),
        (("--mm-processor-kwargs", '{"min_pixels": 4014080}'), 72 * 72),
        (("--mm-processor-kwargs", '{"max_pixels": 401408}', "--mm-processor-kwargs={}"), 1369),
        (("--mm-processor-kwargs", '{"max_pixels": null, "do_rescale": false}'), 1369),
        (("--mm-processor-kwargs", "no JSON"), 1369),  # such an engine does not start
        (("--mm-processor-kwargs.max_pixels" + ".a" * 2_000, "1"), 1369),  # deeper than json can write
    ],
)
def test_engine_arguments_bound_pixels(args: tuple[str, ...], tokens: int) -> None:
    made = service()
    made["spec"]["model"]["uri"] = "hf://Qwen/Qwen2.5-VL-7B-Instruct"
    made["spec"]["engine"] = {"args": list(args)}
    rule = build_catalog([made], []).services["team/chat"].pictures
    assert rule.tokens(1024, 1024) == tokens


def test_pixels_bound_pictures_of_qwen_only() -> None:
    assert PictureRule(PictureFamily.GEMMA, 1, 784).tokens(1024, 1024) == 256


def test_gateway_counts_pictures_by_the_services_bounds() -> None:
    url = f"data:image/png;base64,{base64.b64encode(png(1024, 1024)).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": one}} for one in (url, "https://example.com/a.png")]
    found = parse_body(json.dumps({"model": "m", "messages": [{"role": "user", "content": parts}]}).encode())
    assert isinstance(found, ParsedRequest)
    bounded = found.for_model(PictureRule(most_pixels=401_408))
    assert bounded.media_tokens == {MediaKind.IMAGE: 2 * 22 * 22}
    assert found.prompt.tokens - bounded.prompt.tokens == 1369 + 1024 - 2 * 22 * 22
