"""Requests with sound: the model in the form, the length of the sound, and what is refused."""

from __future__ import annotations

import struct

import pytest

from plimsoll.core.types import MediaKind
from plimsoll.gateway.api_routes import ROUTES
from plimsoll.gateway.audio_form import parse_audio_form
from plimsoll.gateway.errors import Rejection, RejectionReason
from plimsoll.gateway.request_parser import ParsedRequest
from plimsoll.gateway.sound_length import DEFAULT_BYTES_PER_SECOND
from tests.engines.test_form_data import FILE, KIND, MODEL, disposition, form
from tests.gateway.picker_harness import PickerHarness, engine_names, response_headers, service_with_slo

FILE_HEAD = FILE[0]


def wav(seconds: float, rate: int) -> bytes:
    head = b"RIFF" + bytes(4) + b"WAVEfmt " + struct.pack("<IHHIIHH", 16, 1, 1, rate, 2 * rate, 2, 16) + b"data"
    return head + bytes(int(seconds * 2 * rate))


def read(*parts: tuple[str, bytes]) -> ParsedRequest:
    found = parse_audio_form(form(*parts), KIND.encode())
    assert isinstance(found, ParsedRequest), found
    return found


@pytest.mark.parametrize("rate", [8_000, 16_000, 48_000])
def test_wav_counts_by_its_header(rate: int) -> None:
    found = read(MODEL, (FILE_HEAD, wav(70, rate)))
    assert (found.model, found.prompt.sequences) == ("whisper", 3)
    assert abs(found.prompt.tokens - 70 * 25 // 3) <= 2
    assert found.media_tokens.keys() == {MediaKind.AUDIO}


def test_other_sound_counts_by_its_bytes() -> None:
    found = read(MODEL, (FILE_HEAD, b"ID3" + bytes(20 * DEFAULT_BYTES_PER_SECOND)))
    assert (found.prompt.sequences, found.prompt.tokens) == (1, 500)


def test_hostile_wav_header_is_bounded() -> None:
    data = wav(100, 16_000)
    for header in (bytes(4) + data[32:34], b"\xff" * 4 + data[32:34], bytes(6)):  # the rate in bytes, bytes of a frame
        found = read(MODEL, (FILE_HEAD, data[:28] + header + data[34:]))
        assert 2400 <= found.prompt.sequences * found.prompt.tokens <= 3300


def test_options_of_the_form_are_read() -> None:
    fields = {"stream": b"true", "max_completion_tokens": b"9", "prompt": b"x" * 400, "temperature": b"0"}
    found = read(MODEL, (FILE_HEAD, b"1"), *((disposition(f'name="{key}"'), value) for key, value in fields.items()))
    assert (found.stream, found.max_tokens) == (True, 9)
    assert found.prompt.tokens == 100


@pytest.mark.parametrize(
    ("parts", "reason", "param"),
    [
        ([(FILE_HEAD, b"1")], RejectionReason.MODEL_REQUIRED, "model"),
        ([MODEL, MODEL], RejectionReason.DUPLICATE_KEY, "model"),
        ([(disposition('name="model"; filename="m"'), b"whisper")], RejectionReason.MODEL_REQUIRED, "model"),
        ([(disposition("name=model"), b"whisper")], RejectionReason.INVALID_FORM, None),
    ],
)
def test_form_without_one_model_is_refused(
    parts: list[tuple[str, bytes]], reason: RejectionReason, param: str | None
) -> None:
    found = parse_audio_form(form(*parts), KIND.encode())
    assert isinstance(found, Rejection)
    assert (found.reason, found.param) == (reason, param)


def test_transcription_is_booked_at_an_engine_of_its_task() -> None:
    obj = service_with_slo("whisper")
    obj["spec"]["model"]["task"] = "transcribe"
    harness = PickerHarness(obj, pods=engine_names(1, service="whisper"))
    body = form(MODEL, (FILE_HEAD, wav(70, 16_000)))
    headers = {b"x-plimsoll-request-id": b"t1", b"content-type": KIND.encode()}
    reply = harness.picker.check(body, headers, 0.0, ROUTES["/v1/audio/transcriptions"])
    assert response_headers(reply)["x-plimsoll-cluster"] == "pick/team/whisper"
    assert sum(harness.running_by_engine("team/whisper").values()) == 1
    assert harness.service("team/whisper")["requests"]["arrived_media_tokens"]["audio"] > 1000
