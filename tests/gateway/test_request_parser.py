"""What the gateway reads in a body, and what it refuses that an engine would serve."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from plimsoll.core.admission.request import MAX_REQUEST_SEQUENCES
from plimsoll.core.routing.endpoint import Prompt
from plimsoll.gateway.body_forms import PREFIX_BYTES
from plimsoll.gateway.duplicate_keys import MESSAGES_KEY, TRACKED_KEYS, find_duplicate, needs_strict_parse, strip_value
from plimsoll.gateway.errors import Rejection, RejectionReason
from plimsoll.gateway.request_body import MAX_WHOLE_BYTES
from plimsoll.gateway.request_parser import (
    LARGE_BODY_BYTES,
    NeedsWorker,
    ParsedRequest,
    parse_body,
    parse_in_loop,
)


def raises_needs_worker(body: bytes) -> bool:
    try:
        parse_in_loop(body)
    except NeedsWorker:
        return True
    return False


def read(body: bytes) -> ParsedRequest:
    found = parse_body(body)
    assert isinstance(found, ParsedRequest), found
    return found


def reason(body: bytes) -> RejectionReason | None:
    found = parse_body(body)
    return found.reason if isinstance(found, Rejection) else None


@pytest.mark.parametrize(
    ("body", "prompt"),
    [
        ('{"model":"m","prompt":"' + "x" * 400 + '"}', Prompt(100)),
        ('{"model":"m","prompt":[' + ",".join(["7"] * 200) + "]}", Prompt(200)),
        ('{"model":"m","prompt":[[1,2,3],[4,5,6]]}', Prompt(3, 2)),
        ('{"model":"m","prompt":["' + "x" * 396 + '","' + "y" * 397 + '"],"n":3}', Prompt(100, 6)),
        ('{"model":"m","prompt":[]}', Prompt(0, 1)),
        ('{"model":"m","messages":[' + " " * 398 + "]}", Prompt(100)),
        ('{"model":"m"}', Prompt(0)),
        ('{"model":"m","n":4}', Prompt(0, 4)),
        ('{"model":"m","n":"four"}', Prompt(0, 1)),
        ('{"model":"m","n":-4}', Prompt(0, 1)),
        ('{"model":"m","n":16384}', Prompt(0, 16384)),
        ('{"model":"m","n":2.0}', Prompt(0, 2)),
        ('{"model":"m","n":2.5}', Prompt(0, 1)),
        ('{"model":"m","n":true}', Prompt(0, 1)),
    ],
)
def test_prompt_size_is_read(body: str, prompt: Prompt) -> None:
    assert read(body.encode()).prompt == prompt


@pytest.mark.parametrize(
    ("fields", "max_tokens", "stream"),
    [
        ("", None, False),
        ('"max_tokens":7', 7, False),
        ('"max_completion_tokens":9,"stream":true', 9, True),
        ('"max_tokens":7,"max_completion_tokens":5,"stream":false', 7, False),
        ('"max_tokens":0,"max_completion_tokens":5', 5, False),
        ('"max_tokens":-3,"stream":"yes"', None, True),
        ('"max_tokens":true,"stream":1', None, True),
        ('"max_tokens":1e3', None, False),
        ('"max_tokens":1' + "0" * 40, None, False),
    ],
)
def test_max_tokens_and_stream_are_read(fields: str, max_tokens: int | None, stream: bool) -> None:
    found = read(f'{{"model":"m"{"," if fields else ""}{fields}}}'.encode())
    assert (found.max_tokens, found.stream) == (max_tokens, stream)


def test_sequences_are_bounded() -> None:
    found = read(b'{"model":"m","n":16384,"prompt":[' + b'"a",' * 99 + b'"a"]}').prompt
    assert found.sequences == MAX_REQUEST_SEQUENCES


def test_prompt_prefix_is_raw_json() -> None:
    assert read(b'{"messages":[{"a": 1}],"model":"m"}').prompt_prefix == b'[{"a": 1}]'
    assert read(b'{"messages":[1],"prompt":"text","model":"m"}').prompt_prefix == b"[1]"
    assert read(b'{"prompt":"text","model":"m"}').prompt_prefix == b'"text"'
    assert read(b'{"model":"m"}').prompt_prefix == b""
    assert len(read(b'{"model":"m","prompt":"' + b"x" * 2 * PREFIX_BYTES + b'"}').prompt_prefix) == PREFIX_BYTES


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"{}", RejectionReason.MODEL_REQUIRED),
        (b'{"model":null}', RejectionReason.MODEL_REQUIRED),
        (b'{"model":""}', RejectionReason.MODEL_REQUIRED),
        (b'{"model":7}', RejectionReason.MODEL_REQUIRED),
        (b"", RejectionReason.INVALID_JSON),
        (b"[]", RejectionReason.INVALID_JSON),
        (b'{"model":"m"', RejectionReason.INVALID_JSON),
        (b'{"model":"m"} {}', RejectionReason.INVALID_JSON),
        (b'{"model":"m","x":' + b"[" * 100_000, RejectionReason.INVALID_JSON),
        (b'{"model":"m","x":' + b'{"model":' * 100_000, RejectionReason.INVALID_JSON),
        (b'{"model":"m","x":"\xff"}', RejectionReason.INVALID_ENCODING),
        (b'\xef\xbb\xbf{"model":"m"}', RejectionReason.INVALID_ENCODING),
        ('{"model":"m"}'.encode("utf-16"), RejectionReason.INVALID_ENCODING),
        ('{"model":"m"}'.encode("utf-16-le"), RejectionReason.INVALID_ENCODING),
        ('{"model":"m"}'.encode("utf-32-be"), RejectionReason.INVALID_ENCODING),
        (b'{"model":"a","model":"b"}', RejectionReason.DUPLICATE_KEY),
        (b'{"model":"a","m\\u006fdel":"b"}', RejectionReason.DUPLICATE_KEY),
        (b'{"model":"a","prompt":"x","prompt":"y"}', RejectionReason.DUPLICATE_KEY),
        (b'{"model":"m","tools":[{"model":"x","model":"y"}]}', None),
        (b'{"m\\u006fdel":"m"}', None),
        (b'{"model":"m","x":1' + b"0" * 100_000 + b',"y":{"model":1}}', None),
    ],
)
def test_invalid_body_is_rejected_with_reason(body: bytes, expected: RejectionReason | None) -> None:
    assert reason(body) is expected


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (rb'{"model":"\ud800"}', r"\ud800 at byte 10 is one half of a character"),
        (rb'{"model":"m","prompt":"a\\\uDBFF"}', r"\uDBFF at byte 26 is one half of a character"),
        (rb'{"model":"m","prompt":"a\udc00"}', "invalid utf-16 surrogate pair (byte 30)"),
        (rb'{"model":"\ud800","prompt":"a"}', "unexpected end of escaped utf-16 surrogate pair (byte 16)"),
        (rb'{"model":"m","prompt":"\\ud800","x":"', "truncated"),
        (rb'{"model":"m","prompt":"\ud83d\ude00', "truncated"),
    ],
)
def test_half_of_a_character_is_named(body: bytes, words: str) -> None:
    found = parse_body(body)
    assert isinstance(found, Rejection)
    assert (found.reason, words in found.message) == (RejectionReason.INVALID_JSON, True), found.message


def test_only_large_suspicious_bodies_need_worker() -> None:
    plain = b'{"model":"m","x":"' + b"x" * LARGE_BODY_BYTES + b'"}'
    assert not raises_needs_worker(plain)
    assert raises_needs_worker(b'{"tools":[{"model":1}],' + plain[1:])
    assert not raises_needs_worker(b'{"model":"a","model":"b"}')


def test_text_mentioning_keys_needs_no_strict_parse() -> None:
    text = json.dumps({"model": "m", "messages": [{"content": 'say "model": "x" and "prompt"'}]}).encode()
    assert not needs_strict_parse(text)


def test_messages_content_is_not_inspected() -> None:
    value = json.dumps([{"role": "user", "content": "\\u0061", "model": 1}, {"model": 2, "messages": []}]).encode()
    body = b'{"model": "m", "messages": ' + value + b', "n": 2}'
    assert needs_strict_parse(body)
    assert strip_value(body, MESSAGES_KEY, value) == b'{"model": "m", "messages": , "n": 2}'
    assert read(body).prompt == Prompt(len(value) // 4, 2)


@given(st.binary(max_size=300))
def test_any_bytes_are_parsed_or_rejected(body: bytes) -> None:
    assert isinstance(parse_body(body), ParsedRequest | Rejection)


@given(st.text(max_size=300))
def test_any_text_is_parsed_or_rejected(body: str) -> None:
    assert isinstance(parse_body(body.encode("utf-8", "surrogatepass")), ParsedRequest | Rejection)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(TRACKED_KEYS),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(TRACKED_KEYS) | st.text(max_size=4), inner)
    ),
    max_leaves=8,
)


def escaped_key(key: str, escapes: list[bool]) -> str:
    """The key as JSON, with some of its letters as escapes."""
    letters = [f"\\u{ord(c):04x}" if escape else c for c, escape in zip(key, escapes, strict=False)]
    return '"' + "".join(letters) + key[len(letters) :] + '"'


PAIRS = st.lists(
    st.tuples(
        st.sampled_from((*TRACKED_KEYS, "tools", "user")),
        st.lists(st.booleans(), max_size=3),
        JSON | st.sampled_from("ab"),
    ),
    max_size=5,
)


@given(PAIRS)
@example([("model", [], "a"), ("model", [True], "b")])
def test_parsed_model_equals_engine_model(pairs: list[tuple[str, list[bool], Any]]) -> None:
    text = "{" + ",".join(f"{escaped_key(key, escapes)}:{json.dumps(value)}" for key, escapes, value in pairs) + "}"
    keys = [key for key, *_ in pairs]
    found = parse_body(text.encode())
    if any(keys.count(key) > 1 for key in TRACKED_KEYS):
        assert isinstance(found, Rejection)
    if isinstance(found, ParsedRequest):
        assert found.model == json.loads(text)["model"]


@given(PAIRS)
@example([("messages", [], [1]), ("messages", [], [1])])
@example([("tools", [], {"messages": [1]}), ("messages", [], [1]), ("messages", [True], [1])])
@example([("messages", [], 1), ("messages", [], 11), ("model", [], "a"), ("model", [], "a")])
@example([("user", [], {"messages": 1}), ("model", [], "a"), ("model", [], "b"), ("messages", [], "x" * 40)])
def test_find_duplicate_agrees_with_json(pairs: list[tuple[str, list[bool], Any]]) -> None:
    text = "{" + ",".join(f"{escaped_key(key, escapes)}:{json.dumps(value)}" for key, escapes, value in pairs) + "}"
    keys = [key for key, *_ in pairs]
    twice = {key for key in TRACKED_KEYS if keys.count(key) > 1}
    found = find_duplicate(text.encode())
    assert (found in twice) if twice else (found is None)
    assert needs_strict_parse(text.encode()) or not twice
    for part, _, value in pairs:
        name = b'"%b":' % part.encode()
        assert needs_strict_parse(strip_value(text.encode(), name, json.dumps(value).encode())) or not twice


@pytest.mark.parametrize("field", ["prompt", "max_tokens", "stream", "n"])
@pytest.mark.parametrize("value", [b"[]", b"{}", b'{"a":0}', b"[[0]]"])
def test_large_body_of_many_values_needs_a_worker(field: str, value: bytes) -> None:
    body = b'{"model":"m","%b":["",%b]}' % (field.encode(), b",".join([value] * 300_000))
    assert raises_needs_worker(body)
    keys = b",".join(b'"%d":0' % number for number in range(100_000))
    assert raises_needs_worker(b'{"model":"m","%b":{%b}}' % (field.encode(), keys))


def test_large_body_of_few_values_needs_no_worker() -> None:
    many = [{"role": "user", "content": "word " * 1000}] * 50
    assert not raises_needs_worker(json.dumps({"model": "m", "messages": many}).encode())


def test_body_above_bound_needs_a_worker_whatever_it_is() -> None:
    start = b'{"model":"m","prompt":"'
    body = start + b"a" * (MAX_WHOLE_BYTES - len(start) - 2) + b'"}'
    assert not raises_needs_worker(body)
    assert raises_needs_worker(body + b" ")


@pytest.mark.parametrize("value", [b"1e308", b'""'])
def test_large_list_of_scalars_needs_a_worker(value: bytes) -> None:
    body = b'{"model":"m","prompt":["",%b]}' % b",".join([value] * (LARGE_BODY_BYTES // len(value)))
    assert raises_needs_worker(body)


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens", "n", "stream"])
@pytest.mark.parametrize("value", [b"[1e308,1e308]", b'{"a":1}', b"[" * 300 + b"]" * 300])
def test_list_in_scalar_field_is_absent_and_not_decoded(field: str, value: bytes) -> None:
    found = read(b'{"%b":%b,"model":"m","prompt":"abcd"}' % (field.encode(), value))
    assert (found.model, found.max_tokens, found.n, found.stream) == ("m", None, 1, False)
    assert all(limit in (None, []) for limit in found.output_limits.values())


def test_list_as_model_is_rejected_by_its_type() -> None:
    found = parse_body(b'{"model":["m"],"prompt":"a"}')
    assert isinstance(found, Rejection)
    assert found.message.startswith("The field 'model' must be a string")


@pytest.mark.parametrize("n", [b"1e300", b"1" + b"0" * 400, b"18446744073709551617"])
def test_huge_n_is_bounded(n: bytes) -> None:
    assert read(b'{"model":"m","n":' + n + b"}").n == 10**12
