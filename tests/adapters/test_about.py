"""What an engine says of itself, read: each part for itself, nothing of the wrong kind, nothing without bounds."""

from __future__ import annotations

import json
from dataclasses import astuple
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.adapters.about import MAX_BYTES, Start, parse
from plimsoll.core import roofline
from plimsoll.core.calibration.belief import unknown
from plimsoll.core.forecast import Unknown
from plimsoll.core.ladder import choose
from plimsoll.core.ports import About, Ladder
from tests.core.test_roofline import LLAMA_70B

WHOLE: dict[str, Any] = {
    "version": 1,
    "engine": "vllm",
    "engine_version": "0.32.0",
    "role": "serve",
    "phase": "load",
    "phase_seconds": 1.5,
    "phases": [["launch", 0.25], ["import", 4]],
    "ready": False,
    "draining": False,
    "accelerator": {"name": "NVIDIA H200", "count": 2},
    "limits": {
        "max_sequences": 64, "kv_tokens": 919824, "token_budget": 8192, "block_tokens": 16, "max_model_len": 4096,
    },
    "config": LLAMA_70B,
    "ladder": {"prefill": [[16, 0.01], [128, 1]], "decode": [[1, 24, 0.005]]},
}  # fmt: skip


def read(**changes: Any) -> tuple[About, Start]:
    return parse(json.dumps({**WHOLE, **changes}).encode())


def test_a_whole_document() -> None:
    about, start = read()
    ladder = Ladder(((16, 0.01), (128, 1.0)), ((1, 24, 0.005),))
    assert about == About("vllm", "0.32.0", "NVIDIA H200", 2, 64, 919824, 8192, 16, 4096, LLAMA_70B, ladder)
    assert start == Start("load", 1.5, (("launch", 0.25), ("import", 4.0)), False, False)


def test_a_document_that_says_nothing() -> None:
    about, start = parse(b'{"version": 1}')
    assert about == About("unknown", "unknown", "unknown", 0)
    assert start == Start(None, None, (), None, None)


def test_a_start_that_is_over() -> None:
    _, start = read(phase=None, phase_seconds=None, ready=True)
    assert (start.phase, start.phase_s, start.ready) == (None, None, True)


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"", "not JSON"),
        (b"not found", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b'{"version": NaN}', "not JSON"),
        (b"[" * 5000, "not JSON"),
        (b"null", "a JSON NoneType, not an object"),
        (b"[1]", "a JSON list, not an object"),
        (b"{}", "of version 'None', 1 is known"),
        (b'{"version": 2}', "of version '2', 1 is known"),
        (b'{"version": "1"}', "of version '1', 1 is known"),
        (b'{"version": true}', "of version 'True', 1 is known"),
        (b'{"version": [' + b"1," * 999 + b"1]}", "of version"),
        (b" " * (MAX_BYTES + 1), f"{MAX_BYTES + 1} bytes, more than {MAX_BYTES}"),
    ],
)
def test_what_is_no_such_document_is_refused_in_words(raw: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=f"the engine's answer .*{why}") as refused:
        parse(raw)
    assert len(str(refused.value)) < 400


WRONG: list[Any] = [None, True, "7", "", [], [7], {}, {"a": 1}, -1, 0, 1.5, 1e300, 10**15, 10**18]


@pytest.mark.parametrize("value", WRONG, ids=repr)
@pytest.mark.parametrize("name", ["max_sequences", "kv_tokens", "token_budget", "block_tokens", "max_model_len"])
def test_a_limit_that_is_no_count_is_not_known(name: str, value: Any) -> None:
    about, _ = read(limits={**WHOLE["limits"], name: value})
    expected = {**WHOLE["limits"], name: None}
    assert {name: getattr(about, name) for name in expected} == expected


@pytest.mark.parametrize("value", WRONG, ids=repr)
@pytest.mark.parametrize("name", ["engine", "accelerator", "limits", "config", "ladder", "phases", "phase", "ready"])
def test_a_part_of_the_wrong_kind_leaves_the_others(name: str, value: Any) -> None:
    about, start = read(**{name: value})
    whole, begun = read()
    kept = [
        left == right
        for left, right in zip((*astuple(about), *astuple(start)), (*astuple(whole), *astuple(begun)), strict=True)
    ]
    assert kept.count(False) <= (5 if name == "limits" else 2)


@pytest.mark.parametrize("value", [value for value in WRONG if not isinstance(value, dict)], ids=repr)
def test_no_mapping_no_configuration(value: Any) -> None:
    assert read(config=value)[0].config is None
    assert read(ladder=value)[0].ladder is None


@pytest.mark.parametrize("seconds", [None, True, "1", [], -0.1, 1e300, 10**18])
def test_times_that_are_none(seconds: Any) -> None:
    _, start = read(phase_seconds=seconds, phases=[["launch", 0.5], ["import", seconds]])
    assert (start.phase_s, start.phases) == (None, (("launch", 0.5),))


@pytest.mark.parametrize(
    "row", [None, 7, "ab", [], ["a"], ["a", 1, 2], [1, 1], ["", 1], {"a": 1}, [["a"], 1], [None, None]], ids=repr
)
def test_phases_that_are_none(row: Any) -> None:
    assert read(phases=[row, ["launch", 0.5]])[1].phases == (("launch", 0.5),)


@pytest.mark.parametrize(
    "row", [None, 7, "ab", [], [16], [16, 0], [16, -1], [0, 1], [-1, 1], [1.5, 1], ["16", 1], [16, "1"], [16, None],
            [True, 1], [16, True], [16, 1, 1, 1], [10**18, 1], [16, 1e300], {"16": 1}], ids=repr,
)  # fmt: skip
def test_rungs_that_are_none(row: Any) -> None:
    ladder = {"prefill": [row, [16, 0.01]], "decode": [row, [1, 24, 0.005]]}
    assert read(ladder=ladder)[0].ladder == Ladder(((16, 0.01),), ((1, 24, 0.005),))
    assert read(ladder={"prefill": [row], "decode": row})[0].ladder is None


def test_half_a_ladder_is_a_ladder() -> None:
    assert read(ladder={"prefill": [[16, 0.01]]})[0].ladder == Ladder(((16, 0.01),), ())


def test_absurd_sizes_are_cut() -> None:
    about, start = read(
        engine="v" * 5000,
        phases=[["p" * 500, 1]] * 100,
        ladder={"prefill": [[16, 0.01]] * 999, "decode": []},
        config={"model_type": "m" * 5000, **{f"key{n}": [n] * 150 for n in range(150)}},
    )
    assert len(about.engine) == 200
    assert (len(start.phases), len(start.phases[0][0])) == (32, 200)
    assert about.ladder is not None
    assert len(about.ladder.prefill) == 64
    assert about.config is not None
    assert len(about.config) == 128
    assert len(orjson.dumps(about.config)) < 128 * (200 + 128 * 6)


def test_a_configuration_keeps_its_numbers_and_loses_what_makes_no_sense() -> None:
    deep: Any = {"a": 1}
    for _ in range(20):
        deep = {"a": deep, "b": [deep]}
        if len(json.dumps(deep)) > MAX_BYTES // 4:
            break
    config = {"vocab_size": 10**18, "hidden_size": 1e300, "head_dim": -5, "tie_word_embeddings": True, "x": None}
    about, _ = read(config={**config, "deep": deep})
    assert about.config is not None
    assert {key: about.config[key] for key in config} == {
        "vocab_size": None, "hidden_size": None, "head_dim": -5, "tie_word_embeddings": True, "x": None,
    }  # fmt: skip
    assert len(orjson.dumps(about.config["deep"])) < 3000


def test_the_widths_of_quantised_weights_survive() -> None:
    group = {"weights": {"num_bits": 4}, "input_activations": None}
    quantised = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}
    config: dict[str, Any] = {"text_config": {**LLAMA_70B, "quantization_config": quantised}}
    about, _ = read(config=config)
    assert about.config is not None
    assert roofline.model_shape(about.config).weight_bytes == 0.5


def test_numbers_beyond_64_bits_are_no_counts() -> None:
    raw = b'{"version": 1, "limits": {"kv_tokens": %d}, "config": {"vocab_size": %d}}' % (10**30, 10**300)
    about, _ = parse(raw)
    assert about.kv_tokens is None
    assert about.config == {"vocab_size": None}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
    max_leaves=15,
)


# What is read of each part of the document.
OF_THE_ENGINE = {
    "engine": ("engine",),
    "engine_version": ("engine_version",),
    "accelerator": ("accelerator", "gpus"),
    "limits": ("max_sequences", "kv_tokens", "token_budget", "block_tokens", "max_model_len"),
    "config": ("config",),
    "ladder": ("ladder",),
}
OF_ITS_START = {
    "phase": "phase", "phase_seconds": "phase_s", "phases": "phases", "ready": "ready", "draining": "draining",
}  # fmt: skip


@given(st.dictionaries(st.sampled_from(tuple(WHOLE)), json_values))
def test_whatever_stands_in_one_part_the_others_are_read_and_a_choice_is_made_or_refused(
    changes: dict[str, Any],
) -> None:
    (about, start), (whole, started) = read(**{**changes, "version": 1}), read()
    for part in OF_THE_ENGINE.keys() - changes.keys():
        for name in OF_THE_ENGINE[part]:
            assert getattr(about, name) == getattr(whole, name)
    for part in OF_ITS_START.keys() - changes.keys():
        assert getattr(start, OF_ITS_START[part]) == getattr(started, OF_ITS_START[part])
    found = choose(about)
    if isinstance(found, Unknown):
        assert 0 < len(found.why) < 500
    else:
        assert unknown(*found).prior == found[0]


@given(st.binary(max_size=300) | json_values.map(lambda value: json.dumps(value).encode()))
def test_nothing_but_the_named_error_comes_of_other_answers(raw: bytes) -> None:
    with pytest.raises(ValueError, match="the engine's answer"):
        parse(raw)
