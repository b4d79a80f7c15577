"""Where a model that is not on the disk comes from, and which files it has.

Problem: object stores and web servers name, list and check files in their own ways; cache and digest need one form.

Idea: a source is a URI with an optional digest. A store lists its files with sizes and a version of each, and opens one
of them from an offset. Everything else works on that.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import BinaryIO, Protocol


class SourceError(Exception):
    """The model's files are not available; the message says why and what to change."""


class TransientError(Exception):
    """A request failed in a way that may pass: try again."""


@dataclass(frozen=True)
class ModelSource:
    """URI of an s3://, gs:// or https:// model, and the digest that it must have ("sha256:HEX", "" for any)."""

    uri: str
    digest: str = ""

    @property
    def scheme(self) -> str:
        """s3, gs or https."""
        return self.uri.partition("://")[0]

    @property
    def location(self) -> tuple[str, str]:
        """Bucket or host, and the path without slashes at its ends."""
        place, _, path = self.uri.partition("://")[2].partition("/")
        return place, path.strip("/")


@dataclass(frozen=True)
class RemoteFile:
    """A file of a model. path: relative to the model. version: changes with its content (ETag)."""

    path: str
    size: int
    version: str


@dataclass(frozen=True)
class Opened:
    """The bytes of a file from an offset. sha256: hexadecimal digest of the whole file if the store knows it."""

    body: BinaryIO
    sha256: str = ""


class Store(Protocol):
    """A place with one model."""

    def files(self) -> list[RemoteFile]:
        """List the files; raises SourceError or TransientError."""

    def open(self, file: RemoteFile, offset: int) -> Opened:
        """Open the bytes of one file; raises SourceError or TransientError."""


def fingerprint(uri: str, files: Iterable[RemoteFile]) -> str:
    """A name for exactly these files of this URI."""
    listing = sorted((file.path, file.size, file.version) for file in files)
    return hashlib.sha256(json.dumps([uri, listing]).encode()).hexdigest()[:32]


def files_digest(sha256_by_path: Mapping[str, str]) -> str:
    """The digest of a folder: that of the lines `SHA256  PATH` of its files, sorted by path.

    In the folder: `find . -type f -printf '%P\\0' | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum`.
    """
    lines = (f"{sha256}  {path}\n" for path, sha256 in sorted(sha256_by_path.items(), key=lambda one: one[0].encode()))
    return f"sha256:{hashlib.sha256(''.join(lines).encode()).hexdigest()}"
