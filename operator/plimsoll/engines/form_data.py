"""Finds the fields of a multipart/form-data body without copying or decoding its files.

Problem: requests with sound have their model's name in a form. Gateway and engine must read the same field, and a form
may be hostile.

Idea: one module without imports beyond the standard library. `make generate` copies it to the launcher. It accepts the
form that HTTP clients write, and nothing that another parser may read differently. The time is linear in the size.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

MAX_FIELDS: Final = 100
MAX_HEADER_BYTES: Final = 4096

_TOKEN = r"[!#$%&'*+.^_`|~0-9A-Za-z-]"
_BOUNDARY = rf'boundary=(?:({_TOKEN}{{1,70}})|"((?:{_TOKEN}|[ (),/:=?]){{0,69}}(?:{_TOKEN}|[(),/:=?]))")'
_CHARSET, _NEXT = r'charset=(?:utf-8|"utf-8")', r"[ \t]*;[ \t]*"
_CONTENT_TYPE: Final = re.compile(
    rf"multipart/form-data({_NEXT}{_CHARSET})?{_NEXT}{_BOUNDARY}(?(1)|(?:{_NEXT}{_CHARSET})?)", re.IGNORECASE | re.ASCII
)
_DISPOSITION: Final = re.compile(rb"^content-disposition:[ \t]*form-data;([^\r\n]*)", re.IGNORECASE | re.MULTILINE)
_FILE_NAME = rb'(filename)="(?:[^"\\\r\n]|\\[^\r\n])*"|(filename\*)=[^;"\r\n]*'
_PARAMETER: Final = re.compile(rb'[ \t]*(?:(name)="([^"\\\r\n]*)"|%s)[ \t]*(?:;|\Z)' % _FILE_NAME)


class FormError(ValueError):
    """The body is no form that every parser reads alike; the message says why."""


class FormField(NamedTuple):
    """A field: its value is `body[start:end]`."""

    name: str
    start: int
    end: int
    is_file: bool


def boundary_of(content_type: str) -> bytes:
    """Returns the boundary of a content type that has no parameter but it and `charset=utf-8`. Raises FormError."""
    match = _CONTENT_TYPE.fullmatch(content_type)
    if match is None:
        raise FormError(
            'the Content-Type is not "multipart/form-data; boundary=X", where "; charset=utf-8" may be added'
        )
    return (match[2] or match[3]).encode("ascii")


def parse_form(body: bytes, content_type: str) -> list[FormField]:
    """Returns the fields in order. Raises FormError, also for more than MAX_FIELDS."""
    delimiter = b"\r\n--" + boundary_of(content_type)
    if not body.startswith(delimiter[2:]):
        raise FormError("it does not begin with its boundary")
    fields: list[FormField] = []
    position = len(delimiter) - 2
    while body[position : position + 2] != b"--":
        if body[position : position + 2] != b"\r\n":
            raise FormError("a boundary is not followed by a line end")
        if len(fields) == MAX_FIELDS:
            raise FormError(f"it has more than {MAX_FIELDS} fields")
        head_end = body.find(b"\r\n\r\n", position, position + MAX_HEADER_BYTES)
        if head_end < 0:
            raise FormError("a field has no header, or a longer one than 4 KiB")
        start = head_end + 4
        end = _value_end(body, start, delimiter)
        fields.append(_field(body[position + 2 : head_end], start, end))
        position = end + len(delimiter)
    return fields


def _value_end(body: bytes, start: int, delimiter: bytes) -> int:
    end = body.find(delimiter, start)
    while end >= 0 and body[end + len(delimiter) : end + len(delimiter) + 2] not in (b"\r\n", b"--"):
        end = body.find(delimiter, end + 1)
    if end < 0:
        raise FormError("it ends inside a field")
    return end


def _field(head: bytes, start: int, end: int) -> FormField:
    dispositions = _DISPOSITION.findall(head)
    if len(dispositions) != 1:
        raise FormError("a field has no Content-Disposition, or several")
    parameters: dict[bytes, bytes] = {}
    rest = dispositions[0]
    while rest.strip():
        match = _PARAMETER.match(rest)
        key = b"" if match is None else match[1] or match[3] or match[4]
        if match is None or key in parameters:
            raise FormError('a Content-Disposition is not name="...", with or without filename="..."')
        parameters[key] = match[2] or b""
        rest = rest[match.end() :]
    if b"name" not in parameters:
        raise FormError("a field has no name")
    return FormField(parameters[b"name"].decode("utf-8", "replace"), start, end, len(parameters) > 1)
