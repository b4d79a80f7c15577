"""What an engine says of itself, read: each part for itself, nothing of the wrong kind, nothing without bounds."""

from __future__ import annotations

import json
from dataclasses import astuple
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.adapters.launcher import MAX_ENGINE_INFO_BYTES, StartupProgress, parse_engine_info
from plimsoll.core.engine_model import roofline
from plimsoll.core.engine_model.calibration.posterior_model import initial_posterior
from plimsoll.core.engine_model.self_benchmark import choose_prior
from plimsoll.core.ports import EngineInfo, SelfBenchmark
from plimsoll.core.types import Unavailable
from tests.core.test_roofline import LLAMA_70B

FULL_DOCUMENT: dict[str, Any] = {
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
    "self_benchmark": {"prefill": [[16, 0.01], [128, 1]], "decode": [[1, 24, 0.005]]},
}  # fmt: skip


def parse_document(**changes: Any) -> tuple[EngineInfo, StartupProgress]:
    return parse_engine_info(json.dumps({**FULL_DOCUMENT, **changes}).encode())


def test_parse_full_document_reads_all_fields() -> None:
    about, start = parse_document()
    ladder = SelfBenchmark(((16, 0.01), (128, 1.0)), ((1, 24, 0.005),))
    assert about == EngineInfo("vllm", "0.32.0", "NVIDIA H200", 2, 64, 919824, 8192, 16, 4096, LLAMA_70B, ladder)
    assert start == StartupProgress("load", 1.5, (("launch", 0.25), ("import", 4.0)), False, False)


def test_parse_empty_document_returns_unknowns() -> None:
    about, start = parse_engine_info(b'{"version": 1}')
    assert about == EngineInfo("unknown", "unknown", "unknown", 0)
    assert start == StartupProgress(None, None, (), None, None)


def test_parse_ready_engine_has_no_startup_phase() -> None:
    _, start = parse_document(phase=None, phase_seconds=None, ready=True)
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
        (b"{}", "version 'None', supported is 1"),
        (b'{"version": 2}', "version '2', supported is 1"),
        (b'{"version": "1"}', "version '1', supported is 1"),
        (b'{"version": true}', "version 'True', supported is 1"),
        (b'{"version": [' + b"1," * 999 + b"1]}", "has version"),
        (
            b" " * (MAX_ENGINE_INFO_BYTES + 1),
            f"{MAX_ENGINE_INFO_BYTES + 1} bytes, the limit is {MAX_ENGINE_INFO_BYTES}",
        ),
    ],
)
def test_parse_invalid_document_raises_value_error(raw: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=f"the engine's answer .*{why}") as refused:
        parse_engine_info(raw)
    assert len(str(refused.value)) < 400


INVALID_VALUES: list[Any] = [None, True, "7", "", [], [7], {}, {"a": 1}, -1, 0, 1.5, 1e300, 10**15, 10**18]


@pytest.mark.parametrize("value", INVALID_VALUES, ids=repr)
@pytest.mark.parametrize("name", ["max_sequences", "kv_tokens", "token_budget", "block_tokens", "max_model_len"])
def test_parse_invalid_limit_is_none(name: str, value: Any) -> None:
    about, _ = parse_document(limits={**FULL_DOCUMENT["limits"], name: value})
    expected = {**FULL_DOCUMENT["limits"], name: None}
    assert {name: getattr(about, name) for name in expected} == expected


@pytest.mark.parametrize("value", INVALID_VALUES, ids=repr)
@pytest.mark.parametrize(
    "name", ["engine", "accelerator", "limits", "config", "self_benchmark", "phases", "phase", "ready"]
)
def test_parse_invalid_part_keeps_other_parts(name: str, value: Any) -> None:
    about, start = parse_document(**{name: value})
    whole, begun = parse_document()
    kept = [
        left == right
        for left, right in zip((*astuple(about), *astuple(start)), (*astuple(whole), *astuple(begun)), strict=True)
    ]
    assert kept.count(False) <= (5 if name == "limits" else 2)


@pytest.mark.parametrize("value", [value for value in INVALID_VALUES if not isinstance(value, dict)], ids=repr)
def test_parse_non_mapping_config_is_none(value: Any) -> None:
    assert parse_document(config=value)[0].config is None
    assert parse_document(self_benchmark=value)[0].self_benchmark is None


@pytest.mark.parametrize("seconds", [None, True, "1", [], -0.1, 1e300, 10**18])
def test_parse_invalid_phase_seconds_are_dropped(seconds: Any) -> None:
    _, start = parse_document(phase_seconds=seconds, phases=[["launch", 0.5], ["import", seconds]])
    assert (start.phase_s, start.phases) == (None, (("launch", 0.5),))


@pytest.mark.parametrize(
    "row", [None, 7, "ab", [], ["a"], ["a", 1, 2], [1, 1], ["", 1], {"a": 1}, [["a"], 1], [None, None]], ids=repr
)
def test_parse_invalid_phase_rows_are_dropped(row: Any) -> None:
    assert parse_document(phases=[row, ["launch", 0.5]])[1].phases == (("launch", 0.5),)


@pytest.mark.parametrize(
    "row", [None, 7, "ab", [], [16], [16, 0], [16, -1], [0, 1], [-1, 1], [1.5, 1], ["16", 1], [16, "1"], [16, None],
            [True, 1], [16, True], [16, 1, 1, 1], [10**18, 1], [16, 1e300], {"16": 1}], ids=repr,
)  # fmt: skip
def test_parse_invalid_benchmark_rows_are_dropped(row: Any) -> None:
    ladder = {"prefill": [row, [16, 0.01]], "decode": [row, [1, 24, 0.005]]}
    assert parse_document(self_benchmark=ladder)[0].self_benchmark == SelfBenchmark(((16, 0.01),), ((1, 24, 0.005),))
    assert parse_document(self_benchmark={"prefill": [row], "decode": row})[0].self_benchmark is None


def test_parse_partial_benchmark_is_kept() -> None:
    assert parse_document(self_benchmark={"prefill": [[16, 0.01]]})[0].self_benchmark == SelfBenchmark(
        ((16, 0.01),), ()
    )


def test_parse_oversized_values_are_truncated() -> None:
    about, start = parse_document(
        engine="v" * 5000,
        phases=[["p" * 500, 1]] * 100,
        self_benchmark={"prefill": [[16, 0.01]] * 999, "decode": []},
        config={"model_type": "m" * 5000, **{f"key{n}": [n] * 150 for n in range(150)}},
    )
    assert len(about.engine) == 200
    assert (len(start.phases), len(start.phases[0][0])) == (32, 200)
    assert about.self_benchmark is not None
    assert len(about.self_benchmark.prefill) == 64
    assert about.config is not None
    assert len(about.config) == 128
    assert len(orjson.dumps(about.config)) < 128 * (200 + 128 * 6)


def test_parse_config_keeps_numbers_and_drops_invalid_values() -> None:
    deep: Any = {"a": 1}
    for _ in range(20):
        deep = {"a": deep, "b": [deep]}
        if len(json.dumps(deep)) > MAX_ENGINE_INFO_BYTES // 4:
            break
    config = {"vocab_size": 10**18, "hidden_size": 1e300, "head_dim": -5, "tie_word_embeddings": True, "x": None}
    about, _ = parse_document(config={**config, "deep": deep})
    assert about.config is not None
    assert {key: about.config[key] for key in config} == {
        "vocab_size": None, "hidden_size": None, "head_dim": -5, "tie_word_embeddings": True, "x": None,
    }  # fmt: skip
    assert len(orjson.dumps(about.config["deep"])) < 3000


def test_parse_config_keeps_quantization_widths() -> None:
    group = {"weights": {"num_bits": 4}, "input_activations": None}
    quantised = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}
    config: dict[str, Any] = {"text_config": {**LLAMA_70B, "quantization_config": quantised}}
    about, _ = parse_document(config=config)
    assert about.config is not None
    assert roofline.model_shape(about.config).weight_bytes == 0.5


def test_parse_numbers_beyond_64_bits_are_none() -> None:
    raw = b'{"version": 1, "limits": {"kv_tokens": %d}, "config": {"vocab_size": %d}}' % (10**30, 10**300)
    about, _ = parse_engine_info(raw)
    assert about.kv_tokens is None
    assert about.config == {"vocab_size": None}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
    max_leaves=15,
)


# What is read of each part of the document.
ENGINE_INFO_FIELDS = {
    "engine": ("engine",),
    "engine_version": ("engine_version",),
    "accelerator": ("accelerator", "gpus"),
    "limits": ("max_sequences", "kv_tokens", "token_budget", "block_tokens", "max_model_len"),
    "config": ("config",),
    "self_benchmark": ("self_benchmark",),
}
STARTUP_FIELDS = {
    "phase": "phase", "phase_seconds": "phase_s", "phases": "phases", "ready": "ready", "draining": "draining",
}  # fmt: skip


@given(st.dictionaries(st.sampled_from(tuple(FULL_DOCUMENT)), json_values))
def test_parse_arbitrary_part_keeps_others_and_choose_is_total(
    changes: dict[str, Any],
) -> None:
    (about, start), (whole, started) = parse_document(**{**changes, "version": 1}), parse_document()
    for part in ENGINE_INFO_FIELDS.keys() - changes.keys():
        for name in ENGINE_INFO_FIELDS[part]:
            assert getattr(about, name) == getattr(whole, name)
    for part in STARTUP_FIELDS.keys() - changes.keys():
        assert getattr(start, STARTUP_FIELDS[part]) == getattr(started, STARTUP_FIELDS[part])
    found = choose_prior(about)
    if isinstance(found, Unavailable):
        assert 0 < len(found.reason) < 500
    else:
        assert initial_posterior(*found).prior == found[0]


@given(st.binary(max_size=300) | json_values.map(lambda value: json.dumps(value).encode()))
def test_parse_arbitrary_bytes_raise_only_value_error(raw: bytes) -> None:
    with pytest.raises(ValueError, match="the engine's answer"):
        parse_engine_info(raw)
