"""Cut the bytes of one section out of a shared library, and keep the library loadable.

Problem: 310 MB of libtorch_cuda.so are GPU code (section .nv_fatbin). Without a GPU nothing reads them, but the section
lies in the middle of a segment, so that no tool removes it: every address behind it must stay.
Idea: the segment is split in three. What is before and behind the section stays in the file at its old addresses; the
section itself becomes zero-filled memory without bytes in the file. Only file offsets change, and they are in headers.

    python cut_section.py LIBRARY SECTION      (64-bit little-endian ELF)
"""

from __future__ import annotations

import struct
import sys
from dataclasses import dataclass, replace
from pathlib import Path

PAGE = 4096
PT_LOAD, SHT_NOBITS = 1, 8
PROGRAM = struct.Struct("<IIQQQQQQ")
SECTION = struct.Struct("<IIQQQQIIQQ")


@dataclass(frozen=True)
class Segment:
    """A program header."""

    kind: int
    flags: int
    offset: int
    address: int
    physical: int
    file_size: int
    memory_size: int
    align: int

    def pack(self) -> bytes:
        """The header's bytes."""
        return PROGRAM.pack(*(getattr(self, name) for name in self.__dataclass_fields__))


def split(segment: Segment, start: int, end: int) -> list[Segment]:
    """A segment in three: bytes before the file range [start, end), memory in its place, bytes behind it."""
    before, gone = start - segment.offset, end - start
    parts = ((0, before, before), (before, 0, gone), (before + gone, segment.file_size - before - gone, 0))
    pieces = [
        replace(
            segment,
            offset=segment.offset + shift,
            address=segment.address + shift,
            physical=segment.physical + shift,
            file_size=size,
            memory_size=memory or segment.memory_size - shift,
        )
        for shift, size, memory in parts
    ]
    return [piece for piece in pieces if piece.memory_size]


class Library:
    """An ELF file in memory: its segments, and where its sections' headers are."""

    def __init__(self, data: bytes) -> None:
        if data[:6] != b"\x7fELF\x02\x01":
            raise ValueError("not a 64-bit little-endian ELF file")
        self.data = bytearray(data)
        self.program_at, self.sections_at = struct.unpack_from("<QQ", data, 32)
        self.programs, _, self.sections, self.names = struct.unpack_from("<HHHH", data, 56)

    def segments(self) -> list[Segment]:
        """The program headers in order."""
        return [
            Segment(*PROGRAM.unpack_from(self.data, self.program_at + number * PROGRAM.size))
            for number in range(self.programs)
        ]

    def section(self, number: int) -> tuple[int, ...]:
        """A section header's fields: name, type, flags, address, offset, size, ..."""
        return SECTION.unpack_from(self.data, self.sections_at + number * SECTION.size)

    def find(self, name: str) -> int:
        """The number of a section by name; raises LookupError."""
        names_at = self.section(self.names)[4]
        entry = name.encode() + b"\0"
        for number in range(self.sections):
            if self.data.startswith(entry, names_at + self.section(number)[0]):
                return number
        raise LookupError(name)


def cut(data: bytes, name: str) -> bytes:
    """The library without the bytes of a section (its whole pages); raises ValueError where it cannot be done."""
    library = Library(data)
    number = library.find(name)
    _, _, _, _, offset, size, *_ = library.section(number)
    start, end = -(-offset // PAGE) * PAGE, (offset + size) // PAGE * PAGE
    if end <= start:
        return data
    segments: list[Segment] = []
    for segment in library.segments():
        inside = segment.kind == PT_LOAD and segment.offset <= start and end <= segment.offset + segment.file_size
        segments += split(segment, start, end) if inside else [segment]
    room = min(library.section(other)[4] for other in range(1, library.sections)) - library.program_at
    if len(segments) == library.programs or len(segments) * PROGRAM.size > room:
        raise ValueError(f"{name} lies in no segment, or there is no room for more program headers")
    _write_headers(library, segments, number, end, end - start)
    return bytes(library.data[:start] + library.data[end:])


def _write_headers(library: Library, segments: list[Segment], cut_section: int, end: int, gone: int) -> None:
    """New program headers, and every file offset behind the cut moved down."""

    def moved(offset: int) -> int:
        return offset - gone if offset >= end else offset

    table = b"".join(replace(segment, offset=moved(segment.offset)).pack() for segment in segments)
    library.data[library.program_at : library.program_at + len(table)] = table
    for number in range(library.sections):
        fields = list(library.section(number))
        fields[4] = moved(fields[4])
        if number == cut_section:
            fields[1] = SHT_NOBITS
        SECTION.pack_into(library.data, library.sections_at + number * SECTION.size, *fields)
    struct.pack_into("<H", library.data, 56, len(segments))
    struct.pack_into("<Q", library.data, 40, moved(library.sections_at))


def main() -> None:
    """Rewrites the library in place."""
    path, name = Path(sys.argv[1]), sys.argv[2]
    path.write_bytes(cut(path.read_bytes(), name))


if __name__ == "__main__":
    main()
