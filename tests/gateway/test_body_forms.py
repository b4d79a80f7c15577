"""The prompt of each API: its tokens, its sequences, its output limit, and what is refused."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from plimsoll.core.routing.endpoint import Prompt
from plimsoll.core.types import MediaKind
from plimsoll.gateway.api_routes import ROUTES, BodyForm
from plimsoll.gateway.errors import Rejection, RejectionReason
from plimsoll.gateway.media_parts import DEFAULT_TOKENS, image_tokens
from plimsoll.gateway.picture_tokens import PictureFamily, PictureRule
from plimsoll.gateway.prefix_hash import block_hashes
from plimsoll.gateway.request_parser import ParsedRequest, parse_body
from tests.gateway.test_media_parts import png, webp

EMBEDDINGS, RERANK, SCORE = "/v1/embeddings", "/v1/rerank", "/v1/score"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
TEXT = "x" * 398  # 400 bytes with its quotes: 100 tokens


def parse(path: str, **fields: Any) -> ParsedRequest | Rejection:
    return parse_body(json.dumps({"model": "m", **fields}).encode(), ROUTES[path])


def read(path: str, **fields: Any) -> ParsedRequest:
    found = parse(path, **fields)
    assert isinstance(found, ParsedRequest), found
    return found


@pytest.mark.parametrize(
    ("given", "prompt"),
    [
        (TEXT, Prompt(100, 1)),
        ([TEXT] * 8, Prompt(100, 8)),
        (list(range(100, 150)), Prompt(50, 1)),
        ([[5] * 30, [6] * 30], Prompt(30, 2)),
        ([{"role": "user", "content": TEXT}, {"role": "user", "content": TEXT}], Prompt(217, 1)),
        ([[{"role": "user", "content": TEXT}]] * 3, Prompt(109, 3)),
    ],
)
def test_embedding_input_has_tokens_and_sequences(given: Any, prompt: Prompt) -> None:
    found = read(EMBEDDINGS, input=given)
    assert found.prompt.sequences == prompt.sequences
    assert abs(found.prompt.tokens - prompt.tokens) <= 2
    assert (found.max_tokens, found.prompt_field) == (1, "input")


def test_embedding_token_ids_are_exact() -> None:
    assert not read(EMBEDDINGS, input=[1, 2, 3]).is_estimated
    assert read(EMBEDDINGS, input="abc").is_estimated


def test_embedding_messages_are_a_conversation() -> None:
    found = read(EMBEDDINGS, messages=[{"role": "user", "content": TEXT}])
    assert found.prompt.sequences == 1
    assert found.prompt.tokens > 100


@pytest.mark.parametrize(
    ("path", "fields", "prompt", "field"),
    [
        (RERANK, {"query": TEXT, "documents": [TEXT] * 5}, Prompt(200, 5), "documents"),
        (SCORE, {"text_1": TEXT, "text_2": [TEXT] * 5}, Prompt(200, 5), "text_2"),
        (SCORE, {"text_1": [TEXT] * 4, "text_2": [TEXT] * 4}, Prompt(200, 4), "text_2"),
        (SCORE, {"queries": TEXT, "items": [TEXT]}, Prompt(200, 1), "items"),
        (SCORE, {"data_1": TEXT, "data_2": TEXT}, Prompt(200, 1), "data_2"),
        (RERANK, {"query": TEXT}, Prompt(100, 1), "documents"),
    ],
)
def test_pair_counts_as_one_sequence(path: str, fields: dict[str, Any], prompt: Prompt, field: str) -> None:
    found = read(path, **fields)
    assert found.prompt.sequences == prompt.sequences
    assert abs(found.prompt.tokens - prompt.tokens) <= 2
    assert (found.max_tokens, found.prompt_field) == (1, field)


def test_message_counts_system_and_tools_and_has_its_limit() -> None:
    plain = read(MESSAGES, messages=[{"role": "user", "content": TEXT}], max_tokens=7, max_output_tokens=3, n=4)
    assert (plain.max_tokens, plain.prompt.sequences) == (7, 1)
    whole = read(
        MESSAGES,
        messages=[{"role": "user", "content": TEXT}],
        system=[{"type": "text", "text": TEXT}],
        tools=[{"name": "f", "input_schema": {"type": "object", "description": TEXT}}],
        stream=True,
    )
    assert 200 < whole.prompt.tokens - plain.prompt.tokens < 250
    assert whole.stream


def test_message_prefix_begins_with_system_prompt() -> None:
    def hashes(system: str) -> tuple[int, ...]:
        found = read(MESSAGES, system=system, messages=[{"role": "user", "content": "a" * 600}])
        return block_hashes(found.prompt_prefix)

    assert hashes("s" * 600)[0] == hashes("s" * 600)[0] != hashes("t" * 600)[0]


@pytest.mark.parametrize(
    ("path", "field"), [("/v1/chat/completions", "messages"), (MESSAGES, "messages"), (RESPONSES, "input")]
)
def test_prefix_begins_with_tools(path: str, field: str) -> None:
    """Chat templates write the schemas of tools first: other tools share no cached block, the same tools do."""

    def hashes(tools: object, text: str = "a" * 600) -> tuple[int, ...]:
        found = read(
            path, **{field: [{"role": "user", "content": text}]}, **({} if tools is None else {"tools": tools})
        )
        return block_hashes(found.prompt_prefix)

    one = [{"type": "function", "function": {"name": "f", "description": "s" * 1200}}]
    other = [{"type": "function", "function": {"name": "g", "description": "s" * 1200}}]
    assert not set(hashes(one)) & set(hashes(other))
    assert hashes(one)[:2] == hashes(one, "b" * 600)[:2]
    assert hashes(one)[:2] != hashes(None)[:2]
    assert hashes([]) == hashes(None)


@pytest.mark.parametrize(
    "text", ["\u4e16\u754c" * 300, "\u043a\u0430\u043a" * 300, "plain" * 100], ids=["zh", "ru", "en"]
)
@pytest.mark.parametrize("repeat", [1, 100])
def test_escaped_text_counts_as_its_utf8(text: str, repeat: int) -> None:
    """Python's json and other clients escape every character that is not ASCII."""
    body = {"model": "m", "messages": [{"role": "user", "content": text * repeat}]}
    plain, escaped = (parse_body(json.dumps(body, ensure_ascii=escape).encode()) for escape in (False, True))
    assert isinstance(plain, ParsedRequest)
    assert isinstance(escaped, ParsedRequest)
    assert escaped.prompt.tokens == pytest.approx(plain.prompt.tokens, rel=0.01)


@pytest.mark.parametrize("data", [png(560, 280), webp(b"VP8X", 560, 280)])
def test_anthropic_image_counts_by_pixels(data: bytes) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(data).decode()}
    content = [{"type": "image", "source": source}, {"type": "text", "text": "What is it?"}]
    found = read(MESSAGES, messages=[{"role": "user", "content": content}])
    assert found.media_tokens == {MediaKind.IMAGE: image_tokens(560, 280)}
    assert found.prompt.tokens < image_tokens(560, 280) + 100


def test_anthropic_image_behind_url_counts_default() -> None:
    content = [{"type": "image", "source": {"type": "url", "url": "https://x/y.png"}}] * 2
    found = read(MESSAGES, messages=[{"role": "user", "content": content}])
    assert found.media_tokens == {MediaKind.IMAGE: 2 * DEFAULT_TOKENS[MediaKind.IMAGE]}


WORDS = "one, two and three. " * 2000


@pytest.mark.parametrize("words", [WORDS, "x" * 30_000 + WORDS, "\u4e16\u754c" * 5000, "a\u4e16" * 9000])
@pytest.mark.parametrize("escapes", [True, False])
def test_text_with_the_key_of_sound_is_text(words: str, escapes: bool) -> None:
    """Arguments of a tool's call, and a document of text."""
    call = {"type": "tool_use", "id": "1", "name": "save", "input": {"data": words}}
    document = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": words}}
    for part in (call, document):
        body = {"model": "m", "messages": [{"role": "user", "content": [part]}]}
        found = parse_body(json.dumps(body, ensure_ascii=escapes).encode(), ROUTES[MESSAGES])
        assert isinstance(found, ParsedRequest)
        assert found.media_tokens == {}
        assert found.prompt.tokens == pytest.approx(len(words.encode()) / 4, abs=60)


def test_sound_with_escaped_signs_stays_sound() -> None:
    """As .NET and Java's Gson write it."""
    data = base64.b64encode(b"ID3\4\0\0" + b"\xfb\xef\xbe" * 20_000 + b"a").decode()
    assert "+" in data
    assert data.endswith("=")
    part = {"type": "input_audio", "input_audio": {"data": data, "format": "mp3"}}
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": [part]}]})
    for text in (body, body.replace("+", "\\u002B").replace("=", "\\u003d")):
        found = parse_body(text.encode())
        assert isinstance(found, ParsedRequest)
        assert found.media_tokens.keys() == {MediaKind.AUDIO}


def test_embedded_picture_has_tokens_of_its_family() -> None:
    url = f"data:image/png;base64,{base64.b64encode(png(560, 280)).decode()}"
    part = {"type": "image_url", "image_url": {"url": url}}
    found = read(EMBEDDINGS, messages=[{"role": "user", "content": [part]}])
    assert found.for_model(PictureRule(PictureFamily.GEMMA)).media_tokens == {MediaKind.IMAGE: 256}
    several = read(EMBEDDINGS, input=["a", "b"])
    assert several.for_model(PictureRule(PictureFamily.GEMMA)) is several


def test_sound_without_media_type_stays_sound() -> None:
    data = base64.b64encode(b"RIFF0000WAVEfmt " + bytes(40_000)).decode()
    content = [{"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}]
    found = read("/v1/chat/completions", messages=[{"role": "user", "content": content}])
    assert found.media_tokens.keys() == {MediaKind.AUDIO}


def test_response_counts_input_instructions_tools_and_limit() -> None:
    text = read(RESPONSES, input=TEXT, max_output_tokens=9, max_tokens=3, store=True)
    assert abs(text.prompt.tokens - 100) <= 2
    assert text.max_tokens == 9
    items = read(RESPONSES, input=[{"role": "user", "content": TEXT}], instructions=TEXT, tools=[{"name": TEXT}])
    assert items.prompt.tokens > 300
    assert items.prompt.sequences == 1


def test_response_picture_counts_by_pixels() -> None:
    url = f"data:image/png;base64,{base64.b64encode(png(560, 280)).decode()}"
    found = read(RESPONSES, input=[{"role": "user", "content": [{"type": "input_image", "image_url": url}]}])
    assert found.media_tokens == {MediaKind.IMAGE: image_tokens(560, 280)}


@pytest.mark.parametrize(
    ("field", "value"), [("previous_response_id", "resp_1"), ("conversation", {"id": "c"}), ("background", True)]
)
def test_response_that_needs_a_store_is_refused_by_field(field: str, value: Any) -> None:
    found = parse(RESPONSES, input="a", **{field: value})
    assert isinstance(found, Rejection)
    assert (found.reason, found.param) == (RejectionReason.UNSUPPORTED_FIELD, field)
    assert f"'{field}'" in found.message
    for harmless in (None, False):
        assert isinstance(parse(RESPONSES, input="a", **{field: harmless}), ParsedRequest)
    assert isinstance(parse("/v1/chat/completions", messages=[], **{field: value}), ParsedRequest)


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/v1/messages/count_tokens"])
def test_token_routes_need_only_the_model(path: str) -> None:
    assert read(path, prompt=TEXT, tokens=[1]).prompt == Prompt(0, 1)
    found = parse_body(b"{}", ROUTES[path])
    assert isinstance(found, Rejection)
    assert found.reason is RejectionReason.MODEL_REQUIRED


VECTORS = base64.b64encode(bytes(8192 * 50)).decode()  # 50 vectors of 4,096 numbers of 16 bits


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({"prompt_embeds": VECTORS}, Prompt(50, 1)),
        ({"prompt_embeds": VECTORS, "prompt": ""}, Prompt(50, 1)),
        ({"prompt_embeds": [VECTORS, VECTORS], "n": 3}, Prompt(50, 6)),
        ({"prompt_embeds": VECTORS, "prompt": TEXT}, Prompt(75, 2)),
        ({"prompt_embeds": None, "prompt": TEXT}, Prompt(100, 1)),
    ],
)
def test_prompt_given_as_vectors_counts_by_size(fields: dict[str, Any], prompt: Prompt) -> None:
    found = read("/v1/completions", **fields)
    assert (found.prompt, found.is_estimated) == (prompt, True)


@pytest.mark.parametrize(
    ("path", "key"), [(EMBEDDINGS, "input"), (RERANK, "documents"), (RESPONSES, "input"), (MESSAGES, "model")]
)
def test_key_that_occurs_twice_is_rejected(path: str, key: str) -> None:
    body = b'{"model": "m", "%s": "a", "%s": "b"}' % (key.encode(), key.encode())
    found = parse_body(body, ROUTES[path])
    assert isinstance(found, Rejection)
    assert (found.reason, found.param) == (RejectionReason.DUPLICATE_KEY, key)


@pytest.mark.parametrize("path", sorted(path for path, route in ROUTES.items() if route.form is not BodyForm.AUDIO))
@pytest.mark.parametrize("value", [None, 1, "a", [], {}, [[]], [{}], [None], "[", [[1, "a"]], [[[[1]]]]])
def test_parser_never_raises_whatever_the_fields_hold(path: str, value: Any) -> None:
    keys = ("input", "messages", "system", "query", "documents", "text_1", "text_2", "instructions", "tools", "prompt")
    for key in (*keys, "prompt_embeds"):
        assert isinstance(parse(path, **{key: value}), ParsedRequest | Rejection)
