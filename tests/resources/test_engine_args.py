"""Engine arguments are read as vLLM reads them."""

import pytest

from plimsoll.resources import engine_args


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--max-num-seqs", "16"], {"--max-num-seqs": "16"}),
        (["--max_num_seqs=16"], {"--max-num-seqs": "16"}),
        (["--max-num-seqs=16", "--max-num-seqs", "8"], {"--max-num-seqs": "8"}),
        (["--enforce-eager", "--max-model-len", "-1"], {"--max-model-len": "-1"}),
        (["--hf-overrides", '{"a_b": 1}'], {"--hf-overrides": '{"a_b": 1}'}),
        (["--model-loader=a_b=c"], {"--model-loader": "a_b=c"}),
        (["-O3", "--quantization", ""], {"--quantization": ""}),
        (["--last"], {}),
        ([], {}),
    ],
)
def test_flag_values_returns_flag_value_engine_uses(args: list[str], expected: dict[str, str]) -> None:
    assert engine_args.flag_values(args) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("8192", 8192),
        ("1k", 1000),
        ("1K", 1024),
        ("25.6k", 25_600),
        ("2M", 2 * 1024**2),
        ("0.5t", 500_000_000_000),
        ("1.5K", None),
        ("1.5", None),
        ("-1", None),
        ("auto", None),
        ("", None),
        ("1 k", None),
        ("9" * 40, None),
    ],
)
def test_parse_count_accepts_unit_suffix(text: str, expected: int | None) -> None:
    assert engine_args.parse_count(text) == expected
