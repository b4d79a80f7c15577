"""Traces: what is read, what is refused and where, and how a rate is changed."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest

from plimsoll.sim import trace
from plimsoll.sim.errors import BadInput
from plimsoll.sim.visit import Asked

HEAD = "arrival_s,prompt_tokens,output_tokens\n"


def written(folder: Path, text: str, name: str = "t.csv") -> Path:
    path = folder / name
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("t.csv", HEAD + "10,100,5\n12.5,200,6\n"),
        ("t.csv", "arrival_ms,input_length,output_length\n10000,100,5\n12500,200,6\n"),
        ("t.jsonl", '{"timestamp": 10000, "input_length": 100, "output_length": 5}\n\n'
                    '{"timestamp": 12500, "input_length": 200, "output_length": 6}\n'),
    ],
)  # fmt: skip
def test_a_trace_begins_with_its_first_row(tmp_path: Path, name: str, text: str) -> None:
    assert trace.read(written(tmp_path, text, name)) == [Asked(0.0, 100, 5), Asked(2.5, 200, 6)]


def test_what_a_row_may_say_besides(tmp_path: Path) -> None:
    row = {"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [3, 4], "client": 7, "priority": "low"}
    [one] = trace.read(written(tmp_path, json.dumps(row), "t.jsonl"))
    assert one == Asked(0.0, 9, 1, "low", "7", (3, 4))
    text = 'arrival_s,prompt_tokens,output_tokens,hash_ids,tenant\n0,9,1,"[3, 4]",a\n'
    assert trace.read(written(tmp_path, text)) == [Asked(0.0, 9, 1, "", "a", (3, 4))]


def test_a_compressed_trace_is_read(tmp_path: Path) -> None:
    path = tmp_path / "t.csv.gz"
    path.write_bytes(gzip.compress((HEAD + "0,1,1\n").encode()))
    assert len(trace.read(path)) == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (HEAD, "holds no request"),
        ("", "holds no request"),
        ("prompt_tokens,output_tokens\n1,1\n", "no column arrival_s or arrival_ms or timestamp"),
        ("arrival_s,output_tokens\n1,1\n", "no column prompt_tokens or input_length"),
        ("arrival_s,prompt_tokens\n1,1\n", "no column output_tokens or output_length"),
        (HEAD + "1,1,1\n0.5,1,1\n", "row 2, arrival_s: 0.5 is before"),
        (HEAD + "1,1,1\n2,1,1\n1.5,1,1\n", "row 3, arrival_s: 1.5 is before"),
        (HEAD + "-1,1,1\n", "row 1, arrival_s"),
        (HEAD + "nan,1,1\n", "row 1, arrival_s"),
        (HEAD + "inf,1,1\n", "row 1, arrival_s"),
        (HEAD + "soon,1,1\n", "row 1, arrival_s: 'soon'"),
        (HEAD + "0,1,1\n1e9,1,1\n", "row 2, arrival_s: more than a year"),
        (HEAD + "0,0,1\n", "row 1, prompt_tokens"),
        (HEAD + "0,1,1\n1,-5,1\n", "row 2, prompt_tokens"),
        (HEAD + "0,1.5,1\n", "row 1, prompt_tokens"),
        (HEAD + "0,1,NaN\n", "row 1, output_tokens"),
        (HEAD + "0,1,\n", "row 1, output_tokens"),
        (HEAD + "0,1\n", "row 1, output_tokens"),
        (HEAD + "0,1,99999999999\n", "row 1, output_tokens"),
        ('arrival_s,prompt_tokens,output_tokens,hash_ids\n0,1,1,"[1.5]"\n', "row 1, hash_ids"),
        ("arrival_s,prompt_tokens,output_tokens,hash_ids\n0,1,1,x\n", "row 1, hash_ids"),
    ],
)
def test_a_bad_trace_is_refused_where_it_is_bad(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(BadInput) as refused:
        trace.read(written(tmp_path, text))
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"arrival_s": 0, "prompt_tokens": 1, "output_tokens": 1}\n{"arr', "row 2: not JSON"),
        ("[1, 2]\n", "row 1: is no JSON object"),
        ('{"arrival_s": true, "prompt_tokens": 1, "output_tokens": 1}\n', "row 1, arrival_s: True"),
        ('{"arrival_s": null, "prompt_tokens": 1, "output_tokens": 1}\n', "row 1, arrival_s: None"),
        ('{"arrival_s": 0, "prompt_tokens": [1], "output_tokens": 1}\n', "row 1, prompt_tokens"),
    ],
)
def test_bad_lines_are_refused_where_they_are_bad(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(BadInput) as refused:
        trace.read(written(tmp_path, text, "t.jsonl"))
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("name", "words"), [("t.parquet", "pyarrow"), ("t.xls", ".csv or .jsonl"), ("no.csv", "No such")]
)
def test_other_files_are_refused(tmp_path: Path, name: str, words: str) -> None:
    if name != "no.csv":
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(BadInput, match=words):
        trace.read(tmp_path / name)


def test_bytes_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadInput, match="is not text"):
        trace.read(tmp_path / "t.csv")


EVENLY = [Asked(float(n), 10 + n, 1) for n in range(1000)]


def test_a_stretch_begins_at_zero() -> None:
    found = trace.between(EVENLY, 10.0, 20.0)
    assert [one.at_s for one in found] == [float(n) for n in range(10)]
    assert found[0].prompt_tokens == 20


def test_copies_are_laid_over_each_other_and_time_is_not_squeezed() -> None:
    found = trace.scaled(EVENLY, 3.0, Random(1))
    assert len(found) == 3000
    assert all(a.at_s <= b.at_s for a, b in pairwise(found))
    assert 999.0 <= found[-1].at_s < 1001.0
    assert sum(one.at_s < 500.0 for one in found) == pytest.approx(1500, abs=3)


def test_a_fraction_thins_and_the_seed_decides() -> None:
    found = trace.scaled(EVENLY, 0.5, Random(1))
    assert len(found) == pytest.approx(500, abs=60)
    assert set(found) <= set(EVENLY)
    assert found == trace.scaled(EVENLY, 0.5, Random(1)) != trace.scaled(EVENLY, 0.5, Random(2))
    assert len(trace.scaled(EVENLY, 1.5, Random(1))) == pytest.approx(1500, abs=60)
