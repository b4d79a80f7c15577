"""A model as one archive on a web server: https://HOST/PATH.tar, .tar.gz or .tgz.

The archive is a file like another one while it is downloaded. Then its files take its place. Links and names that lead
out of the folder are refused, as is anything but files and folders.
"""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path
from typing import Final

from launcher import store_http
from launcher.model_source import ModelSource, Opened, RemoteFile, SourceError

ARCHIVE: Final = "archive"


class WebArchive:
    """One archive, which a bearer token may protect."""

    def __init__(self, source: ModelSource, token: str) -> None:
        self._source = source
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    def files(self) -> list[RemoteFile]:
        """Return the archive; raises SourceError if its size is not known, and TransientError."""
        with store_http.request(self._source.uri, self._headers, method="HEAD") as answer:
            size = answer.headers.get("Content-Length", "")
            version = answer.headers.get("ETag") or answer.headers.get("Last-Modified") or ""
        if not size.isdigit():
            raise SourceError(f"{self._source.uri} has no Content-Length")
        return [RemoteFile(ARCHIVE, int(size), version)]

    def open(self, file: RemoteFile, offset: int) -> Opened:
        """Open the archive's bytes from an offset; a server without ranges is read and dropped up to there."""
        headers = {**self._headers, **({"Range": f"bytes={offset}-"} if offset else {})}
        if file.version.startswith('"'):
            headers["If-Match"] = file.version
        answer = store_http.request(self._source.uri, headers)
        skipped = offset if answer.status != 206 else 0
        while skipped and (read := answer.read(min(skipped, 1 << 20))):
            skipped -= len(read)
        return Opened(answer)


def unpack(archive: Path, folder: Path) -> None:
    """Unpack the archive into a folder, whose earlier content is lost; raises SourceError.

    A single folder that all files are in is left out, as archives often have one.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        with tarfile.open(archive) as members:
            for member in members:
                if not (member.isfile() or member.isdir()):
                    raise SourceError(f"the archive has {member.name}, which is no file and no folder")
                members.extract(member, folder, filter="data")
    except (tarfile.TarError, EOFError, OSError, ValueError) as error:
        raise SourceError(f"the archive cannot be unpacked: {error}") from None
    entries = list(folder.iterdir())
    if len(entries) == 1 and entries[0].is_dir():
        inner = folder.with_name(f"{folder.name}.inner")
        shutil.rmtree(inner, ignore_errors=True)
        entries[0].rename(inner)
        folder.rmdir()
        inner.rename(folder)
