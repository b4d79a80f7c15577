"""Forms as HTTP clients write them are read; what another parser may read differently is refused."""

from __future__ import annotations

from email.message import Message
from pathlib import Path

import httpx
import pytest
import requests
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
    ("kind", "boundary"),
    [
        (KIND, b"b0"),
        ('multipart/form-data; boundary="b0"', b"b0"),
        ("Multipart/Form-Data; Boundary=B0", b"B0"),
        (
            "multipart/form-data; boundary=2c5d7d0a4a0e4e3bb3a0c7a2ed1f4b55",
            b"2c5d7d0a4a0e4e3bb3a0c7a2ed1f4b55",
        ),  # httpx
        ("multipart/form-data; boundary=------------------------d74496d66958873e", b"-" * 24 + b"d74496d66958873e"),
        ("multipart/form-data; boundary=----WebKitFormBoundary7MA4YWxk", b"----WebKitFormBoundary7MA4YWxk"),
        ("multipart/form-data; boundary=----formdata-undici-0123456789", b"----formdata-undici-0123456789"),
        ('multipart/form-data; boundary="----=_Part_1_2.3"', b"----=_Part_1_2.3"),  # JavaMail
        ('multipart/form-data; boundary="0e5f:a b"', b"0e5f:a b"),  # Go quotes these
        ("multipart/form-data;charset=UTF-8;boundary=b0", b"b0"),  # Spring
        ("multipart/form-data; boundary=b0; charset=UTF-8", b"b0"),  # Apache HttpClient
        ('multipart/form-data; charset="utf-8"; boundary=b0', b"b0"),
    ],
)
def test_boundary_is_read_as_clients_write_it(kind: str, boundary: bytes) -> None:
    assert boundary_of(kind) == boundary


def test_boundary_of_http_clients_is_read() -> None:
    files = {"file": ("a.wav", b"RIFF")}
    by_httpx = httpx.Request("POST", "http://x", files=files)
    by_requests = requests.Request("POST", "http://x", files=files).prepare()
    assert isinstance(by_requests.body, bytes)
    assert parse_form(by_httpx.read(), by_httpx.headers["content-type"])[0].name == "file"
    assert parse_form(by_requests.body, by_requests.headers["content-type"])[0].name == "file"


@pytest.mark.parametrize(
    "kind",
    [
        'multipart/form-data; x="; boundary=b0"; boundary=b1',
        "multipart/form-data; x=1; boundary=b0",
        "multipart/form-data; boundary=b0; boundary=b1",
        "multipart/form-data; boundary=b0; boundary=b0",
        "multipart/form-data; boundary=b0; BOUNDARY=b1",
        "multipart/form-data; boundary*=utf-8''b1; boundary=b0",
        "multipart/form-data; boundary=b0; boundary*0=b1",
        "multipart/form-data; boundary=b0; charset=utf-16",
        "multipart/form-data; charset=utf-8; boundary=b0; charset=utf-16",
        "multipart/form-data; charset=utf-8; charset=utf-8; boundary=b0",
        'multipart/form-data; boundary="b\\0"',
        'multipart/form-data; boundary="b;0"',
        'multipart/form-data; boundary="b0 "',
        'multipart/form-data; boundary="b0',
        "multipart/form-data; boundary=<b0>",
        "multipart/form-data; boundary=b\xe9",
        "multipart/form-data; boundary=b0,multipart/form-data; boundary=b1",
        "multipart/form-data; boundary=b0;",
        "multipart/form-data; boundary=b0\n",
        "multipart/form-datax; boundary=b0",
        f"multipart/form-data; boundary={'b' * 71}",
    ],
)
def test_boundary_that_parsers_may_read_differently_is_refused(kind: str) -> None:
    with pytest.raises(FormError, match='not "multipart/form-data; boundary=X"'):
        boundary_of(kind)


@given(st.lists(st.sampled_from(["boundary", "charset", "=", ";", '"', "b0", "utf-8", " ", "*", "\\", "<", ">"])))
def test_accepted_boundary_is_that_of_another_parser(parts: list[str]) -> None:
    kind = "multipart/form-data; boundary=b1" + "".join(parts)
    try:
        found = boundary_of(kind)
    except FormError:
        return
    message = Message()
    message["content-type"] = kind
    assert message.get_boundary() == found.decode()
    assert message.get_content_charset("utf-8") == "utf-8"


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
