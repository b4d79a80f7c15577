"""Forms as HTTP clients write them are read; what another parser may read differently is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.engines.form_data import MAX_FIELDS, FormError, boundary_of, parse_form

ROOT = Path(__file__).parents[2]
COPY = ROOT / "engine-image/launcher/form_data.py"
KIND = "multipart/form-data; boundary=b0"


def form(*parts: tuple[str, bytes]) -> bytes:
    """A form of these heads and values."""
    return b"".join(b"--b0\r\n%s\r\n\r\n%s\r\n" % (head.encode(), value) for head, value in parts) + b"--b0--\r\n"


def disposition(parameters: str) -> str:
    return f"Content-Disposition: form-data; {parameters}"


MODEL = (disposition('name="model"'), b"whisper")
FILE = (disposition('name="file"; filename="a.wav"') + "\r\nContent-Type: audio/wav", b"RIFF\r\n--b\r\n--b0x\r\n\r\n")


def test_copy_in_launcher_is_equal() -> None:
    assert COPY.read_bytes() == (ROOT / "operator/plimsoll/engines/form_data.py").read_bytes()


def test_fields_have_names_and_values_byte_for_byte() -> None:
    body = form(MODEL, FILE, (disposition('name="prompt"'), b""))
    found = parse_form(body, KIND)
    assert [(f.name, body[f.start : f.end], f.is_file) for f in found] == [
        ("model", b"whisper", False),
        ("file", FILE[1], True),
        ("prompt", b"", False),
    ]


@pytest.mark.parametrize(
    "kind", ['multipart/form-data; boundary="b0"', "multipart/form-data; charset=utf-8; boundary=b0", KIND.title()]
)
def test_boundary_is_read_in_all_spellings(kind: str) -> None:
    assert boundary_of(kind).lower() == b"b0"


@pytest.mark.parametrize(
    "name", ['filename="a\\"b.mp3"', "filename*=UTF-8''%e2%82%ac.mp3", "filename=\"x\"; filename*=UTF-8''x"]
)
def test_file_names_of_clients_are_accepted(name: str) -> None:
    (found,) = parse_form(form((disposition(f'name="file"; {name}'), b"1")), KIND)
    assert (found.name, found.is_file) == ("file", True)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"preamble\r\n" + form(MODEL),
        form(MODEL)[:-6],
        form(("Content-Type: text/plain", b"1")),
        form((disposition("name=model"), b"1")),
        form((disposition('name="a\\"b"'), b"1")),
        form((disposition('name="a"; name="model"'), b"1")),
        form((disposition("name*=UTF-8''model"), b"1")),
        form((disposition('name="a"') + "\r\n" + disposition('name="model"'), b"1")),
        form((disposition('name="a"; x="' + "y" * 5000 + '"'), b"1")),
        form(*[MODEL] * (MAX_FIELDS + 1)),
        form(MODEL).replace(b"\r\n", b"\n"),
    ],
)
def test_ambiguous_or_broken_form_is_refused(body: bytes) -> None:
    with pytest.raises(FormError):
        parse_form(body, KIND)


@pytest.mark.parametrize("kind", ["", "application/json", "multipart/form-data", "multipart/mixed; boundary=b0"])
def test_content_type_without_form_is_refused(kind: str) -> None:
    with pytest.raises(FormError):
        parse_form(form(MODEL), kind)


@given(st.binary(max_size=400))
def test_any_bytes_are_a_form_or_refused(tail: bytes) -> None:
    try:
        found = parse_form(b"--b0\r\n" + tail, KIND)
    except FormError:
        return
    assert all(0 <= field.start <= field.end <= len(tail) + 6 for field in found)
