"""What the parser of the event loop finds in a body, against a full parse of its JSON and what an engine reads."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from plimsoll.gateway.api_routes import CHAT_PATH, ROUTES, BodyForm
from plimsoll.gateway.byte_search import count_bytes, count_unicode_escapes, has_unicode_escape
from plimsoll.gateway.errors import Rejection
from plimsoll.gateway.media_parts import BYTES_PER_TOKEN
from plimsoll.gateway.request_parser import (
    LARGE_BODY_BYTES,
    MAX_N,
    NeedsWorker,
    ParsedRequest,
    parse_body,
    parse_in_loop,
)

COMPLETIONS, EMBEDDINGS, SCORE = "/v1/completions", "/v1/embeddings", "/v1/score"
JSON_PATHS = sorted(path for path, route in ROUTES.items() if route.form is not BodyForm.AUDIO)

# Pieces of a JSON string, as a client may write them.
PIECES = st.sampled_from(
    (
        r"\\u",
        r"\\\u0041",
        r"\u0041",
        r"\u4e16",
        r"\ud83d\ude00",
        r"\u00e9",
        r"\\",
        r"\"model\":",
        r"\n",
        r"\/",
        "é",
        "世",
        "a",
        "u0041",
        "[{",
        r",\"",
        "model",
        " ",
    )
)
STRINGS = st.tuples(
    st.lists(st.tuples(PIECES, st.sampled_from((1, 2, 999, 9999))), min_size=1, max_size=5),
    st.sampled_from((0, 40_000)),
).map(lambda parts: '"' + "".join(piece * times for piece, times in parts[0]) + "x" * parts[1] + '"')
SPACES = st.sampled_from(("", " ", "\n\t", " " * 70_000))
FIELDS = st.sampled_from(
    ("model", "messages", "prompt", "input", "tools", "n", "max_tokens", "user", "text_1", "documents", r"m\u006fdel")
)
VALUES = st.one_of(
    STRINGS,
    STRINGS.map(lambda text: f'[{{"role":"user","content":{text}}}]'),
    STRINGS.map(lambda text: f'{{"model":{text},"messages":[{text}]}}'),
    st.sampled_from(
        ("null", '""', "[]", "{}", "[[1,2],[3]]", "1" * 400, "-0.0", "1e400", "1e-9", '"2"', "true", '"m"')
    ),
)


def in_loop(body: bytes, path: str) -> ParsedRequest | Rejection | None:
    """What the event loop finds, None if it hands over to the worker."""
    try:
        return parse_in_loop(body, ROUTES[path])
    except NeedsWorker:
        return None


def chat(text: str, **fields: Any) -> bytes:
    return (
        json.dumps({"model": "m", **fields, "messages": [{"role": "user", "content": "TEXT"}]})
        .encode()
        .replace(b'"TEXT"', text.encode())
    )


def tokens(path: str, **fields: Any) -> int:
    found = parse_body(json.dumps({"model": "m", **fields}).encode(), ROUTES[path])
    assert isinstance(found, ParsedRequest)
    return found.prompt.tokens * found.prompt.sequences


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(FIELDS, SPACES, VALUES), max_size=5),
    st.sampled_from(JSON_PATHS),
    st.integers(0, 4).map(lambda cut: cut % 4),
)
def test_loop_finds_what_full_parse_finds(pairs: list[tuple[str, str, str]], path: str, cut: int) -> None:
    text = "{" + ",".join(f'{space}"{key}"{space[:2]}:{space}{value}' for key, space, value in pairs) + "}"
    body = text.encode()
    body = body[: len(body) - cut * len(body) // 7] if cut else body
    found, whole = in_loop(body, path), parse_body(body, ROUTES[path])
    assert found is None or found == whole
    assert found is not None or len(body) > LARGE_BODY_BYTES
    if isinstance(whole, ParsedRequest):
        assert whole.model == json.loads(body)["model"]


@settings(max_examples=100, deadline=None)
@given(STRINGS)
@example('"' + r"\\u" * 20_000 + '"')
@example('"' + r"\u0041" * 11_000 + "plain text " * 20_000 + '"')
def test_prompt_has_no_fewer_bytes_than_an_engine_reads(text: str) -> None:
    read = len(json.loads(text).encode("utf-8", "surrogatepass"))
    for body, path in ((chat(text), CHAT_PATH), (b'{"model":"m","prompt":%b}' % text.encode(), COMPLETIONS)):
        found = parse_body(body, ROUTES[path])
        assert isinstance(found, ParsedRequest)
        assert found.prompt.tokens >= read // BYTES_PER_TOKEN


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from((b"\\", b"\\\\", b"\\u", b"\\u0", b"u0", b"a", b"\xc3\xa9")), st.integers(1, 9000))
    )
)
def test_searches_agree_with_a_reading_of_each_byte(pieces: list[tuple[bytes, int]]) -> None:
    text = b"".join(piece * times for piece, times in pieces)
    escapes = low = position = 0
    while (position := text.find(b"\\", position)) >= 0:
        escapes += text[position + 1 : position + 2] == b"u"
        low += text[position + 1 : position + 3] == b"u0"
        position += 2
    assert count_unicode_escapes(text) == (escapes, low)
    assert has_unicode_escape(text) == (b"\\u" in text)
    assert count_bytes(text, b"u\\") == text.count(b"u") + text.count(b"\\")


@pytest.mark.parametrize("shadow", [{"prompt": "hi"}, {"prompt_embeds": "QUJD"}, {"prompt": [1, 2]}, {"prompt": ""}])
def test_chat_counts_messages_whatever_else_it_has(shadow: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": "word " * 1000}]
    assert tokens(CHAT_PATH, messages=messages, **shadow) == tokens(CHAT_PATH, messages=messages) > 1000
    assert tokens(COMPLETIONS, messages=messages, prompt="hi") == 1


@pytest.mark.parametrize(
    "field",
    [
        {"documents": [{"text": "word " * 1000}]},
        {"chat_template": "word " * 1000},
        {"chat_template_kwargs": {"tools": ["word " * 1000]}},
        {"response_format": {"type": "text", "words": "word " * 1000}},
    ],
    ids=lambda field: next(iter(field)),
)
def test_chat_counts_what_its_template_may_write(field: dict[str, Any]) -> None:
    assert tokens(CHAT_PATH, messages=[], **field) > 1000


def test_fields_an_engine_may_read_are_not_hidden() -> None:
    chat_input = [{"role": "user", "content": "word " * 1000}]
    assert tokens(EMBEDDINGS, input="hi", messages=chat_input) > 1000
    assert tokens(SCORE, queries="a", documents=["b"], text_1="a", text_2=["word " * 8] * 500) > 5000
    assert tokens(SCORE, query="a", documents=["b"], data_1="word " * 1000, data_2="a") > 1000


@given(st.text("0123456789_+-. eE\u0661", max_size=6) | st.integers(-3, 99).map(str))
@example("16")
@example("0" * 5000 + "16")
def test_n_is_no_less_than_an_engine_reads(n: str) -> None:
    """Engines read the number in a string (pydantic)."""
    try:
        read = TypeAdapter(int).validate_python(n)
    except ValidationError:
        read = 1
    found = parse_body(chat('"a"', n=n))
    assert isinstance(found, ParsedRequest)
    assert found.n >= min(read, MAX_N)


@pytest.mark.parametrize(
    "value", [True, False, None, 0, 1, 1.0, 2, "true", "True", "t", "YES", "y", "on", "1", "no", "", []]
)
def test_stream_is_what_an_engine_reads(value: Any) -> None:
    try:
        read = TypeAdapter(bool | None).validate_python(value)
    except ValidationError:
        read = False
    found = parse_body(chat('"a"', stream=value))
    assert isinstance(found, ParsedRequest)
    assert found.stream is bool(read)


@pytest.mark.parametrize(
    ("path", "fields", "max_tokens"),
    [
        (CHAT_PATH, {"max_tokens": 1, "max_completion_tokens": 900}, 900),
        (CHAT_PATH, {"max_tokens": 900, "max_completion_tokens": 1}, 900),
        (CHAT_PATH, {"max_tokens": 1, "max_completion_tokens": 10**30}, None),
        (CHAT_PATH, {"max_tokens": 1, "max_completion_tokens": "900"}, None),
        (CHAT_PATH, {"max_tokens": 0, "max_completion_tokens": 5}, 5),
        (CHAT_PATH, {"max_tokens": None, "max_completion_tokens": 5}, 5),
        (COMPLETIONS, {"max_tokens": None, "max_completion_tokens": 1}, None),
        ("/v1/messages", {"max_tokens": 900, "max_completion_tokens": 1}, 900),
        ("/v1/responses", {"max_output_tokens": 900, "max_tokens": 1}, 900),
    ],
)
def test_output_limit_is_that_of_the_engine(path: str, fields: dict[str, Any], max_tokens: int | None) -> None:
    found = parse_body(json.dumps({"model": "m", "prompt": "a", **fields}).encode(), ROUTES[path])
    assert isinstance(found, ParsedRequest)
    assert found.max_tokens == max_tokens
