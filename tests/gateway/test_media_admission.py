"""Requests with pictures are admitted like texts of their tokens, and close no engine."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.gateway.kube_objects import LIMITS
from tests.gateway.picker_harness import PickerHarness, engine_names, response_headers, service_with_slo
from tests.gateway.test_media_parts import QUESTION, image, jpeg, png

SLO = {"ttft": "1s", "tpot": "50ms"}
FULL_HD_TOKENS = 69 * 39


def world_of(engines: int = 1, batch: int = 200) -> PickerHarness:
    return PickerHarness(service_with_slo(batch=batch, slo=SLO), pods=engine_names(engines))


def outcome(reply: Any) -> str:
    if isinstance(reply, asyncio.Future):
        return "queued"
    sent = response_headers(reply)
    return "admitted" if "x-plimsoll-endpoint" in sent else sent.get("x-plimsoll-reason", "rejected")


def send(world: PickerHarness, *parts: Any) -> Any:
    return world.send(messages=[{"role": "user", "content": list(parts)}], max_tokens=100)


@pytest.mark.parametrize("size", [10_000, 100_000, 400_000])
async def test_photo_is_admitted_by_idle_engine(size: int) -> None:
    world = world_of()
    assert outcome(send(world, QUESTION, image(jpeg(1920, 1080, size)))) == "admitted"
    arrived_tokens = world.service()["requests"]["arrived_tokens"]
    assert FULL_HD_TOKENS / 1.5 <= arrived_tokens <= 1.5 * FULL_HD_TOKENS


async def test_sixteen_photos_are_admitted_like_texts() -> None:
    photos, texts = world_of(), world_of()
    words = "word " * (FULL_HD_TOKENS * 4 // 5)
    by_photo = [outcome(send(photos, QUESTION, image(png(1920, 1080, 300_000 - n)))) for n in range(16)]
    by_text = [outcome(send(texts, {"type": "text", "text": f"{n} {words}"})) for n in range(16)]
    assert by_photo == by_text
    assert by_photo.count("admitted") > 4


async def test_photo_closes_no_engine_for_texts() -> None:
    """One photo, then five texts a second for 20 s, each answered after a second."""
    world = world_of()
    first = send(world, QUESTION, image(jpeg(1920, 1080)))
    await asyncio.sleep(0)
    world.advance(2.0)
    world.complete(first, ttft_us=500_000, duration_us=2_000_000, received_us=1_000, sent_bytes=4_000)
    replies = []
    for _ in range(100):
        world.advance(0.2)
        replies.append(outcome(reply := send(world, {"type": "text", "text": "word " * 900})))
        world.complete(reply, ttft_us=100_000, duration_us=200_000, received_us=1_000, sent_bytes=4_000)
    assert set(replies) == {"admitted"}


async def test_learned_ratio_corrects_admission_not_report() -> None:
    """A model makes 256 tokens of each picture. Reports stay uncorrected: the operator learns the ratio from them."""
    world = PickerHarness(
        service_with_slo(batch=200, slo=SLO, token_ratios={"text": 1.0, "image": 256 / FULL_HD_TOKENS}),
        pods=engine_names(1),
    )
    assert outcome(send(world, QUESTION, image(png(1920, 1080)))) == "admitted"
    (running,) = world.picker.admission.services["team/chat"].controller.pool.replicas["10.0.0.1:8000"].running.values()
    assert running.cost.prompt_tokens == pytest.approx(256 + 40, abs=20)
    requests = world.service()["requests"]
    assert requests["arrived_media_tokens"] == {"image": FULL_HD_TOKENS}
    assert requests["arrived_tokens"] > FULL_HD_TOKENS


async def test_token_ids_are_counted_not_corrected() -> None:
    world = PickerHarness(service_with_slo(batch=200, token_ratios={"text": 2.0}), pods=engine_names(1))
    world.send(prompt=[1] * 300)
    (running,) = world.picker.admission.services["team/chat"].controller.pool.replicas["10.0.0.1:8000"].running.values()
    assert running.cost.prompt_tokens == 300


async def test_absurd_ratio_rejects_without_fault() -> None:
    world = PickerHarness(service_with_slo(token_ratios={"text": 100.0}), pods=engine_names(1))
    reply = send(world, {"type": "text", "text": "x" * 6_000_000})
    assert outcome(reply) == "request_too_large"
    assert "team/chat" in world.picker.admission.services


async def test_unusable_ratio_in_status_is_reported() -> None:
    broken = service_with_slo()
    broken[LIMITS]["tokenRatios"] = {"image": -1}
    world = PickerHarness(broken, pods=engine_names(1))
    assert "tokenRatios: image: -1 is not a number" in world.service()["object"]["parse_error"]
