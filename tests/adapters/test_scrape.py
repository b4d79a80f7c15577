"""An engine's metrics read from texts as vLLM's releases write them, and as broken ones do."""

from __future__ import annotations

import asyncio
import math

import pytest

from plimsoll.adapters import engine_metrics
from plimsoll.core.errors import BackendUnavailable
from plimsoll.core.ports import EngineReading
from plimsoll.engines import launched

AT_S = 1.8e9

PAGE = """\
# HELP python_info Python platform information
# TYPE python_info gauge
python_info{implementation="CPython",version="3.12.3"} 1.0
process_start_time_seconds 1.79517047515e+09
plimsoll_engine_ready 1
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 1300.0
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 400.0
vllm:external_prefix_cache_hits_total{engine="0",model_name="m"} 50.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 900.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 300.0
vllm:num_preemptions_total{engine="0",model_name="m"} 1.0
vllm:prompt_tokens_total{engine="0",model_name="m"} 1250.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="local_compute"} 800.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="local_cache_hit"} 390.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="external_kv_transfer"} 60.0
vllm:prompt_tokens_by_source_created{engine="0",model_name="m",source="local_compute"} 1.795170e+09
vllm:generation_tokens_total{engine="0",model_name="m"} 500.0
vllm:generation_tokens_created{engine="0",model_name="m"} 1.795171e+09
vllm:request_prompt_tokens_bucket{engine="0",le="1.0",model_name="m"} 0.0
vllm:request_prompt_tokens_bucket{engine="0",le="200.0",model_name="m"} 3.0
vllm:request_prompt_tokens_bucket{engine="0",le="+Inf",model_name="m"} 4.0
vllm:request_prompt_tokens_count{engine="0",model_name="m"} 4.0
vllm:request_prompt_tokens_sum{engine="0",model_name="m"} 900.0
vllm:request_generation_tokens_bucket{engine="0",le="1.0",model_name="m"} 1.0
vllm:request_generation_tokens_bucket{engine="0",le="200.0",model_name="m"} 4.0
vllm:request_generation_tokens_bucket{engine="0",le="+Inf",model_name="m"} 4.0
vllm:request_generation_tokens_count{engine="0",model_name="m"} 4.0
vllm:request_generation_tokens_sum{engine="0",model_name="m"} 400.0
vllm:iteration_tokens_total_bucket{engine="0",le="+Inf",model_name="m"} 120.0
vllm:iteration_tokens_total_count{engine="0",model_name="m"} 120.0
vllm:iteration_tokens_total_sum{engine="0",model_name="m"} 1750.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.1",model_name="m"} 2.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf",model_name="m"} 5.0
vllm:time_to_first_token_seconds_count{engine="0",model_name="m"} 5.0
vllm:time_to_first_token_seconds_sum{engine="0",model_name="m"} 1.5
vllm:inter_token_latency_seconds_bucket{engine="0",le="+Inf",model_name="m"} 495.0
vllm:inter_token_latency_seconds_sum{engine="0",model_name="m"} 9.9
vllm:request_time_per_output_token_seconds_bucket{engine="0",le="0.01",model_name="m"} 2.0
vllm:request_time_per_output_token_seconds_bucket{engine="0",le="0.025",model_name="m"} 4.0
vllm:request_time_per_output_token_seconds_bucket{engine="0",le="+Inf",model_name="m"} 4.0
vllm:request_time_per_output_token_seconds_count{engine="0",model_name="m"} 4.0
vllm:request_time_per_output_token_seconds_sum{engine="0",model_name="m"} 0.042
vllm:nixl_post_time_seconds_sum{engine="0",model_name="m"} 0.5
vllm:nixl_xfer_time_seconds_sum{engine="0",model_name="m"} 1.25
"""


def read(page: bytes, pod: str, at_s: float) -> EngineReading:
    return engine_metrics.parse_metrics(page, pod, at_s, launched.METRICS)


def without(page: str, *words: str) -> bytes:
    """The page without the lines that hold one of the words."""
    return "".join(line for line in page.splitlines(keepends=True) if not any(w in line for w in words)).encode()


def test_parse_recent_release_reads_every_field() -> None:
    reading = read(PAGE.encode(), "a", AT_S)
    assert (reading.pod, reading.at_s, reading.instance_id) == ("a", AT_S, "1795170475.15")
    assert (reading.running, reading.waiting, reading.kv_used, reading.preemptions) == (3.0, 2.0, 0.25, 1.0)
    assert (reading.steps, reading.computed_tokens, reading.generated_tokens) == (120.0, 1300.0, 500.0)
    assert reading.local_prompt_tokens == 800.0
    assert reading.cached_prompt_tokens == 390.0
    assert reading.transferred_prompt_tokens == 60.0
    assert (reading.post_s, reading.transfer_s) == (0.5, 1.25)
    assert (reading.draft_tokens, reading.accepted_draft_tokens) == (900.0, 300.0)


def test_parse_buckets_are_not_cumulative() -> None:
    reading = read(PAGE.encode(), "a", AT_S)
    assert reading.prompt_tokens == ((1.0, 200.0, math.inf), (0.0, 3.0, 1.0), 900.0)
    assert reading.ttft_s == ((0.1, math.inf), (2.0, 3.0), 1.5)


def test_parse_tpot_excludes_single_token_requests() -> None:
    assert read(PAGE.encode(), "a", AT_S).tpot_s == (
        (0.01, 0.025, math.inf),
        (1.0, 2.0, 0.0),
        0.042,
    )


def test_parse_ranks_are_summed_and_kv_usage_is_max() -> None:
    other = PAGE.replace('engine="0"', 'engine="1"').replace("perc{engine=", "perc{dp=").replace("} 0.25", "} 0.75")
    reading = read((PAGE + other).encode(), "a", AT_S)
    assert (reading.running, reading.waiting, reading.kv_used, reading.steps) == (6.0, 4.0, 0.75, 240.0)
    assert reading.local_prompt_tokens == 1600.0
    assert reading.ttft_s == ((0.1, math.inf), (4.0, 6.0), 3.0)
    assert reading.instance_id == "1795170475.15"


def test_parse_two_processes_join_start_times() -> None:
    other = "process_start_time_seconds 1.7e+09\n"
    assert read((PAGE + other).encode(), "a", AT_S).instance_id == "1700000000.0,1795170475.15"


def test_parse_without_process_start_uses_oldest_created() -> None:
    page = without(PAGE, "process_start")
    later = b'vllm:request_success_created{finished_reason="abort"} 1.795199e+09\n'  # a label that came later
    assert read(page, "a", AT_S).instance_id == read(page + later, "a", AT_S).instance_id == "1795170000.0"
    assert read(without(PAGE, "process_start", "_created"), "a", AT_S).instance_id == ""


def test_parse_old_kv_usage_name_is_fallback() -> None:
    old = PAGE.replace("kv_cache_usage", "gpu_cache_usage")
    assert read(old.encode(), "a", AT_S).kv_used == 0.25
    both = PAGE + 'vllm:gpu_cache_usage_perc{engine="0"} 0.5\n'
    assert read(both.encode(), "a", AT_S).kv_used == 0.25


def test_parse_old_release_without_sources_omits_computed_tokens() -> None:
    reading = read(without(PAGE, "by_source"), "a", AT_S)
    assert reading.local_prompt_tokens is None
    assert reading.cached_prompt_tokens == 400.0
    assert reading.transferred_prompt_tokens == 50.0
    assert reading.computed_tokens is None  # its iterations counted cached tokens too


def test_parse_old_release_without_hits_uses_iteration_tokens() -> None:
    page = without(PAGE, "by_source").replace(b"} 400.0", b"} 0.0").replace(b"} 50.0", b"} 0.0")
    assert read(page, "a", AT_S).computed_tokens == 1750.0


def test_parse_iteration_tokens_do_not_inflate_computed_tokens() -> None:
    page = PAGE.replace('tokens_total_sum{engine="0",model_name="m"} 1750.0', "tokens_total_sum{} 2200.0")
    assert read(page.encode(), "a", AT_S).computed_tokens == 1300.0


def test_parse_inter_token_histogram_is_not_tpot() -> None:
    old = PAGE.replace("inter_token_latency", "time_per_output_token")
    assert read(without(old, "request_time_per"), "a", AT_S).tpot_s is None


@pytest.mark.parametrize("name", ["inter_token_latency", "time_per_output_token"])
def test_parse_inter_token_latency_accepts_old_and_new_name(name: str) -> None:
    page = PAGE.replace("inter_token_latency", name).encode()
    assert read(page, "a", AT_S).itl_s == ((math.inf,), (495.0,), 9.9)
    assert read(without(PAGE, "inter_token_latency"), "a", AT_S).itl_s is None


def test_parse_missing_metric_is_none() -> None:
    reading = read(b"vllm:num_requests_running 0.0\n", "a", AT_S)
    assert reading.running == 0.0
    assert (reading.waiting, reading.kv_used, reading.steps, reading.post_s, reading.tpot_s) == (None,) * 5


@pytest.mark.parametrize(
    "line",
    [
        b"vllm:num_requests_running",
        b'vllm:num_requests_running{engine="1"}',
        b'vllm:num_requests_running{engine="1"} lots',
        b'vllm:num_requests_running{engine="1" 4.0',
        b"vllm:num_requests_running{",
        b'vllm:request_prompt_tokens_bucket{engine="0"} 4.0',
        b'vllm:request_prompt_tokens_bucket{le="far"} 4.0',
        b'vllm:request_time_per_output_token_seconds_bucket{le="NaN"} 4.0',
        b"vllm:\xff\xfe 1.0",
        b"vllm:",
    ],
)
def test_parse_broken_line_is_skipped(line: bytes) -> None:
    text = PAGE.encode().replace(b"# HELP python", line + b"\n# HELP python")
    assert read(text, "a", AT_S) == read(PAGE.encode(), "a", AT_S)


def test_parse_accepts_syntax_in_labels_and_timestamps() -> None:
    odd = r'vllm:num_requests_running{model_name="a {le=\"1\"} b",engine="0"} 7.0 1800000000000'
    assert read(odd.encode(), "a", AT_S).running == 7.0
    assert read(odd.replace("\n", "\r\n").encode() + b"\r\n", "a", AT_S).running == 7.0


@pytest.mark.parametrize("missing", ['le="+Inf"', "_tokens_sum"])
def test_parse_incomplete_histogram_is_none(missing: str) -> None:
    assert read(without(PAGE, missing), "a", AT_S).prompt_tokens is None


def test_parse_decreasing_histogram_is_none() -> None:
    page = PAGE.replace('le="200.0",model_name="m"} 3.0', 'le="200.0",model_name="m"} 9.0')
    assert read(page.encode(), "a", AT_S).prompt_tokens is None


@pytest.mark.parametrize("text", [b"", b"plimsoll_engine_ready 0\n", b"<html>no</html>", b"vllm:unheard_of 1.0\n"])
def test_parse_text_without_vllm_metrics_raises(text: bytes) -> None:
    with pytest.raises(ValueError, match="no metric of vLLM"):
        read(text, "a", AT_S)


async def test_fetch_queries_engine_address_and_stamps_time() -> None:
    requested: list[tuple[str, int, str]] = []

    async def http_get(address: str, port: int, path: str, tls_name: str = "") -> bytes:
        requested.append((address, port, path))
        return PAGE.encode()

    page, reading = await engine_metrics.fetch_page(
        http_get, "10.0.0.7", 8001, "/metrics", "a", launched.METRICS, lambda: AT_S
    )
    assert requested == [("10.0.0.7", 8001, "/metrics")]
    assert page == PAGE.encode()
    assert (reading.pod, reading.running, reading.at_s) == ("a", 3.0, AT_S)


async def test_fetch_without_engine_metrics_raises_unavailable() -> None:
    async def launcher_alone(address: str, port: int, path: str, tls_name: str = "") -> bytes:
        return b"plimsoll_engine_ready 0\n"

    with pytest.raises(BackendUnavailable, match="a: the page has no metric of vLLM"):
        await engine_metrics.fetch_page(launcher_alone, "10.0.0.7", 8001, "/metrics", "a", launched.METRICS)


BUCKET = b'vllm:request_prompt_tokens_bucket{le="%d"} 1\n'
HOSTILE_PAGES = {
    "malformed": b"vllm:\n" * (1 << 18),
    "creation times": b"vllm:a_created 1\n" * (1 << 16),
    "buckets": b"".join(BUCKET % n for n in range(1_000, 22_000)).replace(b"} 1", b"} 3"),
    "processes": b"".join(b"process_start_time_seconds %d\n" % n for n in range(31_000)),
    "one line": b"vllm:num_requests_waiting{" + b'a="b",' * 170_000 + b"} 1\n",
    "empty lines": b"\n" * (1 << 20),
}


@pytest.mark.parametrize("text", HOSTILE_PAGES.values(), ids=HOSTILE_PAGES)
async def test_fetch_of_hostile_page_lets_the_loop_run(text: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in bytes, between two turns of another task: at most a piece, or one line that is longer."""
    page = text + PAGE.encode()
    read_bytes, largest = 0, 0
    add_line = engine_metrics._Page.add_line

    def counted(self: engine_metrics._Page, line: bytes) -> None:
        nonlocal read_bytes
        read_bytes += len(line) + 1
        add_line(self, line)

    async def http_get(address: str, port: int, path: str, tls_name: str = "") -> bytes:
        return page

    async def other_task() -> None:
        nonlocal read_bytes, largest
        while True:
            largest, read_bytes = max(largest, read_bytes), 0
            turns.append(1)
            await asyncio.sleep(0)

    turns: list[int] = []
    monkeypatch.setattr(engine_metrics._Page, "add_line", counted)
    other = asyncio.create_task(other_task())
    _, reading = await engine_metrics.fetch_page(http_get, "10.0.0.7", 8001, "/metrics", "a", launched.METRICS)
    other.cancel()
    longest_line = max(map(len, page.split(b"\n"))) + 1
    assert max(largest, read_bytes) <= max(engine_metrics.PIECE_BYTES, longest_line)
    assert len(turns) >= (len(page) - longest_line) // engine_metrics.PIECE_BYTES
    assert reading.running == 3.0
    assert reading.prompt_tokens is not None
    assert sum(reading.prompt_tokens.counts) == 4.0
    assert len(reading.prompt_tokens.edges) <= engine_metrics.MAX_SERIES + 1
    assert len(reading.instance_id) < 16 * engine_metrics.MAX_SERIES


async def test_ordinary_page_is_the_same_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = read(PAGE.encode(), "a", AT_S)
    for size in (1, 100, len(PAGE) - 1):
        monkeypatch.setattr(engine_metrics, "PIECE_BYTES", size)
        assert read(PAGE.encode(), "a", AT_S) == whole


async def test_fetch_unreachable_engine_raises_unavailable() -> None:
    async def silence(address: str, port: int, path: str, tls_name: str = "") -> bytes:
        raise BackendUnavailable(f"{address} did not answer within 2 s")

    with pytest.raises(BackendUnavailable, match="did not answer"):
        await engine_metrics.fetch_page(silence, "10.0.0.7", 8001, "/metrics", "a", launched.METRICS)
