"""First tokens of running responses: admission control learns each once, at the gateway that decides."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest

from plimsoll.core.admission.controller import AdmissionController
from plimsoll.core.admission.first_token_reports import report_age_s
from plimsoll.core.admission.replica import SILENT_S
from plimsoll.gateway.envoy.access_log import AccessLogReader, AccessRecord
from plimsoll.gateway.envoy.access_log_config import end_log, running_log
from plimsoll.gateway.settings import PickerSettings
from tests.gateway.one_queue_harness import Gateways, eventually
from tests.gateway.picker_harness import PickerHarness, engine_names, running_record, service_with_slo

LATE_US = 5_000_000


def controller_of(picker: object) -> AdmissionController:
    found: AdmissionController = picker.admission.services["team/chat"].controller  # type: ignore[attr-defined]
    return found


def margin_s(world: PickerHarness) -> float:
    return controller_of(world.picker)._margins[0].margin_s


def started() -> tuple[PickerHarness, bytes]:
    world = PickerHarness(service_with_slo(batch=50), pods=engine_names(1))
    reply = world.send(stream=True)
    assert isinstance(reply, bytes)
    return world, reply


async def test_first_token_counts_before_the_end_and_once() -> None:
    world, reply = started()
    before = margin_s(world)
    world.clock.advance_to(6.0)
    world.report_first_token(reply, LATE_US)
    widened = margin_s(world)
    assert widened > before
    world.report_first_token(reply, LATE_US)
    world.complete(reply, ttft_us=LATE_US, duration_us=6_000_000, sent_bytes=9)
    assert margin_s(world) == widened
    stats = world.picker.stats("team/chat")
    assert (stats.early_first_tokens, stats.ttft.total()) == (1, 1)


async def test_first_token_of_an_ended_response_is_ignored() -> None:
    world, reply = started()
    world.complete(reply, ttft_us=LATE_US, duration_us=6_000_000)
    after = margin_s(world)
    world.report_first_token(reply, LATE_US)
    assert (margin_s(world), world.picker.stats("team/chat").early_first_tokens) == (after, 0)


@pytest.mark.parametrize("change", [{"ttft_us": None}, {"status": 500}, {"request_id": "other"}, {"flags": "UC"}])
async def test_report_without_a_first_token_is_ignored(change: dict[str, object]) -> None:
    world, reply = started()
    before = margin_s(world)
    record = msgspec.structs.replace(running_record(reply, LATE_US), **change)
    world.picker.reports.on_running_record(record, 6.0)
    assert (margin_s(world), world.picker.stats("team/chat").early_first_tokens) == (before, 0)


@pytest.mark.parametrize("stream", [True, False])
async def test_engine_is_silent_only_while_a_stream_is_awaited(stream: bool) -> None:
    world = PickerHarness(service_with_slo(batch=50), pods=engine_names(1))
    reply = world.send(stream=stream)
    assert isinstance(reply, bytes)
    (replica,) = controller_of(world.picker).pool.replicas.values()
    assert (replica.silence_s(6.0) > SILENT_S) is stream
    world.clock.advance_to(6.0)
    world.report_first_token(reply, LATE_US)
    assert replica.silence_s(6.0) == 0.0


async def test_first_token_reaches_the_owner(tmp_path: Path) -> None:
    async with Gateways(tmp_path, 2, service_with_slo(batch=9), pods=engine_names(1)) as gateways:
        (other,), owner = gateways.others(), gateways.owner()
        reply = await other.ask("hi", stream=True)
        margin = controller_of(owner.picker)._margins[0]
        before = margin.margin_s
        (replica,) = controller_of(owner.picker).pool.replicas.values()
        assert replica.silence_s(time.monotonic() + 9.0) > SILENT_S
        other.picker.reports.on_running_record(running_record(reply, LATE_US), time.monotonic())
        await eventually(lambda: margin.margin_s > before, "the owner knows the first token")
        widened = margin.margin_s
        other.complete(reply, ttft_us=LATE_US, duration_us=6_000_000)
        await eventually(lambda: owner.admits == 0, "the owner knows the end")
        assert margin.margin_s == widened
        assert (other.picker.stats("team/chat").early_first_tokens, owner.picker.stats("team/chat").ttft.total()) == (
            1,
            0,
        )


@pytest.mark.parametrize(("ttft_s", "age_s"), [(0.1, 1.0), (1.0, 1.0), (1.1, 2.0), (5.0, 8.0), (513.0, None)])
def test_report_ages_double(ttft_s: float, age_s: float | None) -> None:
    assert report_age_s(ttft_s) == age_s


def test_ended_and_running_records_are_separate_logs() -> None:
    settings = PickerSettings()
    assert end_log(settings)["filter"] == {"log_type_filter": {"types": ["DownstreamEnd"]}}
    running = running_log(settings)["filter"]["and_filter"]["filters"]
    assert running[0] == {"log_type_filter": {"types": ["DownstreamPeriodic"]}}
    assert len(running[1]["or_filter"]["filters"]) == 10


def test_line_of_a_running_response_is_read(tmp_path: Path) -> None:
    records: list[AccessRecord] = []
    reader = AccessLogReader(tmp_path / "fifo", records.append)
    reader.feed(b'{"request_id":"a","upstream":"10.0.0.1:8000","status":200,"ttft_us":"7","is_running":"true"}\n')
    reader.feed(b'{"request_id":"a","upstream":"10.0.0.1:8000","status":200,"ttft_us":7,"duration_us":9}\n')
    assert [(record.ttft_us, record.is_running) for record in records] == [(7, True), (7, False)]
