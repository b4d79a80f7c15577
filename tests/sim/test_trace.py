"""Traces: what is read, what is refused and where, and how a rate is changed."""

from __future__ import annotations

import gzip
import json
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest

from plimsoll.sim import trace
from plimsoll.sim.attempt import TraceRequest
from plimsoll.sim.errors import BadInput

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
def test_read_trace_starts_at_its_first_row(tmp_path: Path, name: str, text: str) -> None:
    assert trace.read(written(tmp_path, text, name)) == [TraceRequest(0.0, 100, 5), TraceRequest(2.5, 200, 6)]


def test_read_optional_columns_are_kept(tmp_path: Path) -> None:
    row = {"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [3, 4], "client": 7, "priority": "low"}
    [one] = trace.read(written(tmp_path, json.dumps(row), "t.jsonl"))
    assert replace(one, block_ids=()) == TraceRequest(0.0, 9, 1, "low", "7", (), "7")
    assert len(set(one.block_ids)) == 2
    text = 'arrival_s,prompt_tokens,output_tokens,hash_ids,tenant\n0,9,1,"[3, 4]",a\n'
    assert trace.read(written(tmp_path, text)) == [TraceRequest(0.0, 9, 1, "", "a", one.block_ids)]
    text = "arrival_s,prompt_tokens,output_tokens,adapter\n0,9,1,sql\n"
    assert trace.read(written(tmp_path, text)) == [TraceRequest(0.0, 9, 1, adapter="sql")]


def test_read_block_hashes_include_their_prefix(tmp_path: Path) -> None:
    """An engine's cache is one of beginnings: a block's own name may come twice in a prompt, and after others."""
    listed = [[1, 2, 3], [1, 2, 9], [5, 2, 3], [1, 1, 1], [-1], [-2], [2**70]]
    rows = [{"timestamp": n, "input_length": 2000, "output_length": 1, "hash_ids": ids} for n, ids in enumerate(listed)]
    found = [one.block_ids for one in trace.read(written(tmp_path, "\n".join(map(json.dumps, rows)), "t.jsonl"))]
    assert list(map(len, found)) == list(map(len, listed))
    assert found[0][:2] == found[1][:2]
    assert len({name for ids in found for name in ids}) == 3 + 1 + 3 + 2 + 3  # [1, ...] begins alike thrice
    assert all(0 <= name < 2**60 for ids in found for name in ids)


def test_read_client_is_tenant_unless_tenant_is_given(tmp_path: Path) -> None:
    text = "timestamp,prompt_tokens,output_tokens,client,tenant,priority\n0,9,1,c1,,\n1500,9,1,c1,t2,high\n"
    first, second = trace.read(written(tmp_path, text))
    assert (first.tenant, first.client, first.request_class) == ("c1", "c1", "")
    assert (second.at_s, second.tenant, second.client, second.request_class) == (1.5, "t2", "c1", "high")


def test_read_timestamp_may_be_a_date(tmp_path: Path) -> None:
    text = "timestamp,prompt_tokens,output_tokens\n2023-11-16 18:17:03.979960,9,1\n2023-11-16T18:17:05.479960,9,1\n"
    assert [one.at_s for one in trace.read(written(tmp_path, text))] == pytest.approx([0.0, 1.5])
    zoned = [{"timestamp": f"2024-01-01T0{n}:00:00+0{n}:00", "input_length": 1, "output_length": 1} for n in (1, 2)]
    requested = trace.read(written(tmp_path, "\n".join(map(json.dumps, zoned)), "t.jsonl"))
    assert [one.at_s for one in requested] == [0.0, 0.0]


def test_read_header_may_start_with_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(HEAD + "0,1,1\n", encoding="utf-8-sig")
    assert len(trace.read(tmp_path / "t.csv")) == 1


def test_read_parquet_with_pyarrow(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = {
        "arrival_ms": arrow.array([10_000, 12_500], arrow.int32()),
        "prompt_tokens": [100, 200],
        "output_tokens": [5, 6],
        "client": arrow.array([3, None], arrow.int16()),
        "hash_ids": [[1, 2], None],
        "session": [8, 9],
    }
    path = tmp_path / "t.parquet"
    parquet.write_table(arrow.table(columns), path, row_group_size=1)
    first, second = trace.read(path)
    assert (replace(first, block_ids=()), second) == (
        TraceRequest(0.0, 100, 5, "", "3", (), "3"),
        TraceRequest(2.5, 200, 6),
    )
    assert len(first.block_ids) == 2
    for differing, words in (
        ({"prompt_tokens": [100, None]}, "row 2, prompt_tokens: None"),
        ({"arrival_ms": [5.0, float("nan")]}, "row 2, arrival_ms: nan"),
        ({"arrival_ms": [5, 4]}, "row 2, arrival_ms: 4 is before"),
    ):
        parquet.write_table(arrow.table(columns | differing), path)
        with pytest.raises(BadInput, match=words):
            trace.read(path)
    parquet.write_table(arrow.table({"session": [8, 9]}), path)
    with pytest.raises(BadInput, match=r"none of the columns arrival_s, .* among 'session'"):
        trace.read(path)
    path.write_bytes(b"PAR1 but not really PAR1")
    with pytest.raises(BadInput, match="not Parquet"):
        trace.read(path)


def _dated(path: Path, moments: list[int], unit: str, zone: str | None = None) -> Path:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    column = arrow.array(moments, arrow.timestamp(unit, zone))
    parquet.write_table(arrow.table({"timestamp": column, "prompt_tokens": [1, 2], "output_tokens": [1, 2]}), path)
    return path


@pytest.mark.parametrize(("unit", "zone"), [("ns", None), ("ns", "UTC"), ("us", "Europe/Berlin")])
def test_read_parquet_dates_with_unit_and_zone(tmp_path: Path, unit: str, zone: str | None) -> None:
    each = {"ns": 10**9, "us": 10**6}[unit]
    path = _dated(tmp_path / "t.parquet", [1, 5 * each // 2 + 1], unit, zone)
    assert [one.at_s for one in trace.read(path)] == pytest.approx([0.0, 2.5], abs=1e-6)


@pytest.mark.parametrize(("moment", "zone"), [(2**61, None), (5, "Mars/Olympus")])
def test_read_parquet_date_out_of_range_is_rejected(tmp_path: Path, moment: int, zone: str | None) -> None:
    with pytest.raises(BadInput, match=r"t\.parquet: a value that Python cannot hold"):
        trace.read(_dated(tmp_path / "t.parquet", [0, moment], "us", zone))


def test_read_parquet_duplicate_column_is_rejected(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    names = ["arrival_s", "prompt_tokens", "output_tokens", "output_tokens"]
    parquet.write_table(arrow.table([arrow.array([1])] * 4, names=names), tmp_path / "t.parquet")
    with pytest.raises(BadInput, match="the head names 'output_tokens' twice"):
        trace.read(tmp_path / "t.parquet")


def test_read_header_error_is_escaped_and_short(tmp_path: Path) -> None:
    names = ["\x1b[2Jgone", "long" * 100, *(f"c{n}" for n in range(100))]
    row = json.dumps(dict.fromkeys(names, 1))
    for name, text in (("t.csv", ",".join(names) + "\n" + "1," * 101 + "1\n"), ("t.jsonl", row)):
        with pytest.raises(BadInput) as refused:
            trace.read(written(tmp_path, text, name))
        assert "\x1b" not in str(refused.value)
        assert "'c7' and 92 more" in str(refused.value)
        assert len(str(refused.value)) < 400


def test_read_dates_before_1970_are_accepted(tmp_path: Path) -> None:
    text = "timestamp,prompt_tokens,output_tokens\n1969-07-16 13:32:00,9,1\n1969-07-16 13:32:02.5,9,1\n"
    assert [one.at_s for one in trace.read(written(tmp_path, text))] == [0.0, 2.5]
    text = "timestamp,prompt_tokens,output_tokens\n1969-07-16 13:32:02,9,1\n1969-07-16 13:32:00,9,1\n"
    with pytest.raises(BadInput, match="row 2, timestamp: '1969-07-16 13:32:00' is before"):
        trace.read(written(tmp_path, text))


def test_read_parquet_without_pyarrow_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(BadInput, match=r"in a checkout of Plimsoll, pip install '\.\[simulate\]'"):
        trace.read(written(tmp_path, "x", "t.parquet"))


@pytest.mark.parametrize("cut", [4, -12])
def test_read_truncated_gzip_is_rejected(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "t.csv.gz"
    path.write_bytes(gzip.compress((HEAD + "0,1,1\n" * 500).encode())[:cut])
    with pytest.raises(BadInput, match=r"t\.csv\.gz: is cut off"):
        trace.read(path)


def test_read_gzip_csv(tmp_path: Path) -> None:
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
        (HEAD + "1,1,1\n0.5,1,1\n", "row 2, arrival_s: '0.5' is before"),
        (HEAD + "1,1,1\n2,1,1\n1.5,1,1\n", "row 3, arrival_s: '1.5' is before"),
        (HEAD + "-1,1,1\n", "row 1, arrival_s"),
        (HEAD + "nan,1,1\n", "row 1, arrival_s"),
        (HEAD + "inf,1,1\n", "row 1, arrival_s"),
        (HEAD + "soon,1,1\n", "row 1, arrival_s: 'soon'"),
        (HEAD + "0,1,1\n1e9,1,1\n", "row 2, arrival_s: more than a year"),
        (HEAD + "0,0,1\n", "row 1, prompt_tokens"),
        (HEAD + "0,1,1\n1,-5,1\n", "row 2, prompt_tokens"),
        (HEAD + "0,1.5,1\n", "row 1, prompt_tokens"),
        (HEAD + "0,1_000,1\n", "row 1, prompt_tokens: '1_000'"),
        (HEAD + "0,1,NaN\n", "row 1, output_tokens"),
        (HEAD + "0,1,\n", "row 1, output_tokens"),
        (HEAD + "0,1\n", "row 1, output_tokens"),
        (HEAD + "0,1,99999999999\n", "row 1, output_tokens"),
        (HEAD + "0,1,1,7\n", "row 1: more values than the head has columns"),
        ("arrival_s,prompt_tokens,output_tokens,output_tokens\n0,1,1,1\n", "the head names 'output_tokens' twice"),
        (HEAD + '0,1,1\n1,"1,1\n', "not CSV"),
        ("timestamp,prompt_tokens,output_tokens\nyesterday,1,1\n", "row 1, timestamp: 'yesterday' is neither"),
        ("timestamp,prompt_tokens,output_tokens\n-5,1,1\n", "row 1, timestamp"),
        (
            "timestamp,prompt_tokens,output_tokens\n2024-01-02,1,1\n2024-01-01,1,1\n",
            "row 2, timestamp: '2024-01-01' is",
        ),
        ('arrival_s,prompt_tokens,output_tokens,hash_ids\n0,1,1,"[1.5]"\n', "row 1, hash_ids"),
        ("arrival_s,prompt_tokens,output_tokens,hash_ids\n0,1,1,x\n", "row 1, hash_ids"),
    ],
)
def test_read_invalid_csv_is_rejected_with_position(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(BadInput) as refused:
        trace.read(written(tmp_path, text))
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"arrival_s": 0, "prompt_tokens": 1, "output_tokens": 1}\n{"arr', "row 2: not JSON"),
        ("[1, 2]\n", "row 1: is no JSON object"),
        ("[" * 100_000, "row 1: not JSON"),
        ('{"arrival_s": 0, "prompt_tokens": 1' + "0" * 400 + ', "output_tokens": 1}\n', "row 1, prompt_tokens"),
        ('{"arrival_s": 0, "prompt_tokens": 1, "output_tokens": NaN}\n', "row 1, output_tokens: nan"),
        ('{"arrival_s": 0, "prompt_tokens": 1, "output_tokens": 1, "tenant": {}}\n', "row 1, tenant: {} is no name"),
        ('{"arrival_s": 0, "prompt_tokens": 1, "output_tokens": 1, "priority": 1.5}\n', "row 1, priority: 1.5 is no"),
        ('{"arrival_s": true, "prompt_tokens": 1, "output_tokens": 1}\n', "row 1, arrival_s: True"),
        ('{"arrival_s": null, "prompt_tokens": 1, "output_tokens": 1}\n', "row 1, arrival_s: None"),
        ('{"arrival_s": 0, "prompt_tokens": [1], "output_tokens": 1}\n', "row 1, prompt_tokens"),
    ],
)
def test_read_invalid_jsonl_is_rejected_with_position(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(BadInput) as refused:
        trace.read(written(tmp_path, text, "t.jsonl"))
    assert words in str(refused.value)


@pytest.mark.parametrize(("name", "words"), [("t.xls", ".csv, .jsonl or .parquet"), ("no.csv", "No such")])
def test_read_unsupported_file_is_rejected(tmp_path: Path, name: str, words: str) -> None:
    if name != "no.csv":
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(BadInput, match=words):
        trace.read(tmp_path / name)


def test_read_binary_file_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadInput, match="is not text"):
        trace.read(tmp_path / "t.csv")


UNIFORM_REQUESTS = [TraceRequest(float(n), 10 + n, 1) for n in range(1000)]


def test_clip_result_starts_at_zero() -> None:
    found = trace.clip(UNIFORM_REQUESTS, 10.0, 20.0)
    assert [one.at_s for one in found] == [float(n) for n in range(10)]
    assert found[0].prompt_tokens == 20


def test_scale_rate_above_one_overlays_copies() -> None:
    found = trace.scale_rate(UNIFORM_REQUESTS, 3.0, Random(1))
    assert len(found) == 3000
    assert all(a.at_s <= b.at_s for a, b in pairwise(found))
    assert 999.0 <= found[-1].at_s < 1001.0
    assert sum(one.at_s < 500.0 for one in found) == pytest.approx(1500, abs=3)


def test_scale_rate_below_one_samples_by_seed() -> None:
    found = trace.scale_rate(UNIFORM_REQUESTS, 0.5, Random(1))
    assert len(found) == pytest.approx(500, abs=60)
    assert set(found) <= set(UNIFORM_REQUESTS)
    assert (
        found
        == trace.scale_rate(UNIFORM_REQUESTS, 0.5, Random(1))
        != trace.scale_rate(UNIFORM_REQUESTS, 0.5, Random(2))
    )
    assert len(trace.scale_rate(UNIFORM_REQUESTS, 1.5, Random(1))) == pytest.approx(1500, abs=60)
