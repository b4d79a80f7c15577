"""What the gateway reads in a body, and what it refuses that an engine would serve."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from plimsoll.core.admission.outcome import MOST_SEQUENCES
from plimsoll.core.picking.endpoint import Prompt
from plimsoll.gateway.classify import BEGINNING, LARGE, Request, classify, needs_worker
from plimsoll.gateway.keys import MESSAGES, READ, repeated, suspicious, without
from plimsoll.gateway.replies import Reason, Refusal


def read(body: bytes) -> Request:
    found = classify(body)
    assert isinstance(found, Request), found
    return found


def reason(body: bytes) -> Reason | None:
    found = classify(body)
    return found.reason if isinstance(found, Refusal) else None


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
def test_size_of_a_prompt(body: str, prompt: Prompt) -> None:
    assert read(body.encode()).prompt == prompt


@pytest.mark.parametrize(
    ("fields", "max_tokens", "stream"),
    [
        ("", None, False),
        ('"max_tokens":7', 7, False),
        ('"max_completion_tokens":9,"stream":true', 9, True),
        ('"max_tokens":7,"max_completion_tokens":5,"stream":false', 5, False),
        ('"max_tokens":0,"max_completion_tokens":5', 5, False),
        ('"max_tokens":-3,"stream":"yes"', None, False),
        ('"max_tokens":true,"stream":1', None, False),
        ('"max_tokens":1e3', None, False),
        ('"max_tokens":1' + "0" * 40, None, False),
    ],
)
def test_length_and_kind_of_the_answer(fields: str, max_tokens: int | None, stream: bool) -> None:
    found = read(f'{{"model":"m"{"," if fields else ""}{fields}}}'.encode())
    assert (found.max_tokens, found.stream) == (max_tokens, stream)


def test_a_size_beyond_reason_is_bounded() -> None:
    found = read(b'{"model":"m","n":16384,"prompt":[' + b'"a",' * 99 + b'"a"]}').prompt
    assert found.sequences == MOST_SEQUENCES


def test_the_beginning_of_a_prompt_is_its_raw_json() -> None:
    assert read(b'{"messages":[{"a": 1}],"model":"m"}').beginning == b'[{"a": 1}]'
    assert read(b'{"messages":[1],"prompt":"text","model":"m"}').beginning == b'"text"'
    assert read(b'{"model":"m"}').beginning == b""
    assert len(read(b'{"model":"m","prompt":"' + b"x" * 2 * BEGINNING + b'"}').beginning) == BEGINNING


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"{}", Reason.MODEL_REQUIRED),
        (b'{"model":null}', Reason.MODEL_REQUIRED),
        (b'{"model":""}', Reason.MODEL_REQUIRED),
        (b'{"model":7}', Reason.MODEL_REQUIRED),
        (b'{"model":"m","n":16385}', Reason.REQUEST_TOO_LARGE),
        (b'{"model":"m","n":1e300}', Reason.REQUEST_TOO_LARGE),
        (b'{"model":"m","n":1' + b"0" * 400 + b"}", Reason.REQUEST_TOO_LARGE),
        (b'{"model":"m","n":18446744073709551617}', Reason.REQUEST_TOO_LARGE),
        (b"", Reason.INVALID_JSON),
        (b"[]", Reason.INVALID_JSON),
        (b'{"model":"m"', Reason.INVALID_JSON),
        (b'{"model":"m"} {}', Reason.INVALID_JSON),
        (b'{"model":"m","x":' + b"[" * 100_000, Reason.INVALID_JSON),
        (b'{"model":"m","x":' + b'{"model":' * 100_000, Reason.INVALID_JSON),
        (b'{"model":"m","x":"\xff"}', Reason.INVALID_ENCODING),
        (b'\xef\xbb\xbf{"model":"m"}', Reason.INVALID_ENCODING),
        ('{"model":"m"}'.encode("utf-16"), Reason.INVALID_ENCODING),
        ('{"model":"m"}'.encode("utf-16-le"), Reason.INVALID_ENCODING),
        ('{"model":"m"}'.encode("utf-32-be"), Reason.INVALID_ENCODING),
        (b'{"model":"a","model":"b"}', Reason.DUPLICATE_KEY),
        (b'{"model":"a","m\\u006fdel":"b"}', Reason.DUPLICATE_KEY),
        (b'{"model":"a","prompt":"x","prompt":"y"}', Reason.DUPLICATE_KEY),
        (b'{"model":"m","tools":[{"model":"x","model":"y"}]}', None),
        (b'{"m\\u006fdel":"m"}', None),
        (b'{"model":"m","x":1' + b"0" * 100_000 + b',"y":{"model":1}}', None),
    ],
)
def test_refusals(body: bytes, expected: Reason | None) -> None:
    assert reason(body) is expected


def test_only_large_and_suspicious_bodies_go_to_the_worker() -> None:
    plain = b'{"model":"m","x":"' + b"x" * LARGE + b'"}'
    assert not needs_worker(plain)
    assert needs_worker(b'{"tools":[{"model":1}],' + plain[1:])
    assert not needs_worker(b'{"model":"a","model":"b"}')


def test_text_that_mentions_keys_is_not_suspicious() -> None:
    text = json.dumps({"model": "m", "messages": [{"content": 'say "model": "x" and "prompt"'}]}).encode()
    assert not suspicious(text)


def test_what_a_conversation_holds_is_not_looked_at() -> None:
    value = json.dumps([{"role": "user", "content": "\\u0061", "model": 1}, {"model": 2, "messages": []}]).encode()
    body = b'{"model": "m", "messages": ' + value + b', "n": 2}'
    assert suspicious(body)
    assert without(body, MESSAGES, value) == b'{"model": "m", "messages": , "n": 2}'
    assert read(body).prompt == Prompt(len(value) // 4, 2)


@given(st.binary(max_size=300))
def test_any_bytes_are_read_or_refused(body: bytes) -> None:
    assert isinstance(classify(body), Request | Refusal)


@given(st.text(max_size=300))
def test_any_text_is_read_or_refused(body: str) -> None:
    assert isinstance(classify(body.encode("utf-8", "surrogatepass")), Request | Refusal)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(READ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(READ) | st.text(max_size=4), inner),
    max_leaves=8,
)


def spelled(key: str, escapes: list[bool]) -> str:
    """The key as JSON, with some of its letters as escapes."""
    letters = [f"\\u{ord(c):04x}" if escape else c for c, escape in zip(key, escapes, strict=False)]
    return '"' + "".join(letters) + key[len(letters) :] + '"'


PAIRS = st.lists(
    st.tuples(
        st.sampled_from((*READ, "tools", "user")), st.lists(st.booleans(), max_size=3), JSON | st.sampled_from("ab")
    ),
    max_size=5,
)


@given(PAIRS)
@example([("model", [], "a"), ("model", [True], "b")])
def test_what_is_read_is_what_the_engine_reads(pairs: list[tuple[str, list[bool], Any]]) -> None:
    text = "{" + ",".join(f"{spelled(key, escapes)}:{json.dumps(value)}" for key, escapes, value in pairs) + "}"
    keys = [key for key, *_ in pairs]
    found = classify(text.encode())
    if any(keys.count(key) > 1 for key in READ):
        assert isinstance(found, Refusal)
    if isinstance(found, Request):
        assert found.model == json.loads(text)["model"]


@given(PAIRS)
@example([("messages", [], [1]), ("messages", [], [1])])
@example([("tools", [], {"messages": [1]}), ("messages", [], [1]), ("messages", [True], [1])])
@example([("messages", [], 1), ("messages", [], 11), ("model", [], "a"), ("model", [], "a")])
@example([("user", [], {"messages": 1}), ("model", [], "a"), ("model", [], "b"), ("messages", [], "x" * 40)])
def test_a_key_is_repeated_exactly_where_json_says_so(pairs: list[tuple[str, list[bool], Any]]) -> None:
    text = "{" + ",".join(f"{spelled(key, escapes)}:{json.dumps(value)}" for key, escapes, value in pairs) + "}"
    keys = [key for key, *_ in pairs]
    twice = {key for key in READ if keys.count(key) > 1}
    found = repeated(text.encode())
    assert (found in twice) if twice else (found is None)
    assert suspicious(text.encode()) or not twice
    for part, _, value in pairs:
        name = b'"%b":' % part.encode()
        assert suspicious(without(text.encode(), name, json.dumps(value).encode())) or not twice
