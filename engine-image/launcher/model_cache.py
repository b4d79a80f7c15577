"""A folder of downloaded models that pods, and their restarts, share.

Problem: several pods may download one model at once, a download may break off at any point, and the disk is finite.

Idea: each version of a model has a folder, named by URI and listing. A file lock on it lets one process download; the
others wait, and then find the model. `complete.json` is written last, so a folder without it is a download to go on
with. It has size and SHA-256 of each file. The engine keeps a shared lock while it runs: locks outlive `exec`. When a
download needs room, on the disk or within the cache's bound, models that no process has locked are deleted, the least
recently used first. One process at a time looks for room, and reserves what its model needs: that counts as used while
the download has its lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import math
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from launcher.model_source import SourceError

COMPLETE, FILES, ARCHIVE, LOCK, RESERVED = "complete.json", "files", "archive", ".lock", "reserved.json"
FOLDER: Final = "plimsoll"  # in the cache, next to that of Hugging Face

_SHOWN_DOWNLOADS: Final = 3

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Complete:
    """What a complete model is: its URI, its digest, and size and SHA-256 of each file by path."""

    uri: str
    digest: str
    files: dict[str, tuple[int, str]]


class Entry:
    """One version of a model in the cache."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.files = folder / FILES
        self.archive = folder / ARCHIVE  # a folder for an archive before it is unpacked

    @property
    def name(self) -> str:
        """Name of the folder."""
        return self._folder.name

    def complete(self) -> Complete | None:
        """What the model is if it is complete, and all files have their size; else None."""
        found = read_complete(self._folder)
        if found is None:
            return None
        try:
            sizes = {path: (self.files / path).stat().st_size for path in found.files}
        except OSError:
            return None
        return found if all(found.files[path][0] == size for path, size in sizes.items()) else None

    def finish(self, complete: Complete) -> None:
        """Write what the model is, as one step."""
        partial = self._folder / f"{COMPLETE}.part"
        with partial.open("w", encoding="utf-8") as file:
            json.dump(asdict(complete), file)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(self._folder / COMPLETE)
        (self._folder / RESERVED).unlink(missing_ok=True)

    def reopen(self) -> None:
        """Begin a download: the model is not complete until `finish`. Files that are there stay."""
        (self._folder / COMPLETE).unlink(missing_ok=True)

    def clear(self) -> None:
        """Delete all files of the model."""
        for name in (COMPLETE, RESERVED):
            (self._folder / name).unlink(missing_ok=True)
        shutil.rmtree(self.files, ignore_errors=True)
        shutil.rmtree(self.archive, ignore_errors=True)

    def mark_used(self) -> None:
        """Record that the model is used now; a cache that is read-only does without."""
        with contextlib.suppress(OSError):
            os.utime(self._folder / COMPLETE)


class ModelCache:
    """The cache below a mounted volume. disk_free: free bytes of the disk with a folder. max_bytes: of its models."""

    def __init__(
        self,
        root: Path,
        disk_free: Callable[[Path], int] = lambda path: shutil.disk_usage(path).free,
        max_bytes: int | None = None,
    ) -> None:
        self._root = root / FOLDER
        self._disk_free = disk_free
        self._max_bytes = max_bytes

    def entry(self, name: str) -> Entry:
        """The folder of one version, which is made if it is absent; raises SourceError."""
        folder = self._root / name
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SourceError(f"the model cache cannot be written: {error.strerror}: {folder}") from None
        return Entry(folder)

    def find(self, uri: str, digest: str) -> Entry | None:
        """A complete model of this URI with this digest."""
        for folder in self._folders():
            entry = Entry(folder)
            found = entry.complete()
            if found is not None and (found.uri, found.digest) == (uri, digest):
                return entry
        return None

    def lock(self, entry: Entry, *, shared: bool) -> int:
        """Lock a version, alone or with others; waits. Returns a descriptor that a program after `exec` keeps."""
        path = self._root / entry.name / LOCK
        operation = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o664)
            os.set_inheritable(descriptor, True)
            try:
                fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
            except BlockingIOError:
                log.info("another process downloads the model: waiting for it")
                fcntl.flock(descriptor, operation)
        except OSError as error:
            raise SourceError(f"the model cache has no file locks: {error.strerror}: {path}") from None
        return descriptor

    def reserve(self, total: int, uri: str, entry: Entry) -> None:
        """Reserve `total` bytes for a version that the caller has locked alone, in place of what it has of them.

        Deletes unused models until there is room; raises SourceError if there is none then.
        """
        own = self._root / entry.name
        with self._alone():
            needed = max(0, total - _size(own))
            downloads = [found for folder in self._folders() if folder != own and (found := _download_in(folder))]
            pending = sum(one.missing for one in downloads)
            for folder in self._by_last_use():
                if min(self._disk_free(self._root), self._left_bytes()) - pending >= needed:
                    break
                if folder != own and (freed := _delete_unused(folder)):
                    log.info("deleted %s from the model cache to make room", freed)
            needs = f"the model needs {needed / 1e9:.1f} GB, and "
            if (free := self._disk_free(self._root) - pending) < needed:
                raise SourceError(
                    f"{needs}the model cache has {max(0, free) / 1e9:.1f} GB left{_with_downloads(downloads)}: "
                    "enlarge the volume of spec.model.cache"
                )
            if (left := self._left_bytes() - pending) < needed:
                raise SourceError(
                    f"{needs}models in use leave {max(0.0, left) / 1e9:.1f} GB of the node's cache"
                    f"{_with_downloads(downloads)}: enlarge engine.nodeCache.size of the chart"
                )
            (own / RESERVED).write_text(json.dumps({"uri": uri, "bytes": total}), encoding="utf-8")

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Wait until no other process looks for room."""
        path = self._root / LOCK
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o664)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            raise SourceError(f"the model cache has no file locks: {error.strerror}: {path}") from None
        try:
            yield
        finally:
            os.close(descriptor)

    def _left_bytes(self) -> float:
        """Bytes that the bound leaves; infinite without one."""
        return math.inf if self._max_bytes is None else self._max_bytes - sum(map(_size, self._folders()))

    def _folders(self) -> Iterator[Path]:
        try:
            # Names with a dot are no models: what compilers keep lies there too.
            yield from sorted(path for path in self._root.iterdir() if path.is_dir() and not path.name.startswith("."))
        except FileNotFoundError:
            return

    def _by_last_use(self) -> list[Path]:
        def used_at(folder: Path) -> float:
            try:
                return (folder / COMPLETE).stat().st_mtime
            except OSError:
                return 0.0  # a download that broke off

        return sorted(self._folders(), key=used_at)


def _size(folder: Path) -> int:
    """Bytes of a model's files, complete or not; a file that is deleted meanwhile has none."""
    total = 0
    for path in (*(folder / FILES).rglob("*"), *(folder / ARCHIVE).rglob("*")):
        with contextlib.suppress(OSError):
            total += path.stat().st_size if path.is_file() else 0
    return total


@dataclass(frozen=True)
class _Download:
    """A download under way: its URI, and the reserved bytes that it has not written."""

    uri: str
    missing: int


def _download_in(folder: Path) -> _Download | None:
    """The download that a process makes in a folder; None without one, also after one that broke off."""
    try:
        document = json.loads((folder / RESERVED).read_text(encoding="utf-8"))
        download = _Download(str(document["uri"]), max(0, int(document["bytes"]) - _size(folder)))
        descriptor = os.open(folder / LOCK, os.O_RDWR)
    except (OSError, ValueError, LookupError, TypeError):
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return download
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return None


def _with_downloads(downloads: list[_Download]) -> str:
    """A part of a message that names the downloads under way."""
    if not downloads:
        return ""
    count = "a download" if len(downloads) == 1 else f"{len(downloads)} downloads"
    uris = ", ".join(one.uri for one in downloads[:_SHOWN_DOWNLOADS])
    return f" with {count} under way ({uris}{', ...' if len(downloads) > _SHOWN_DOWNLOADS else ''})"


def read_complete(folder: Path) -> Complete | None:
    """Read what a model is; None if it is not complete."""
    try:
        document = json.loads((folder / COMPLETE).read_text(encoding="utf-8"))
        files = {str(path): (int(size), str(sha256)) for path, (size, sha256) in document["files"].items()}
        return Complete(str(document["uri"]), str(document["digest"]), files)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def _delete_unused(folder: Path) -> str:
    """Delete a model that no process has locked; returns its URI or name, "" if it is in use."""
    try:
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o664)
    except OSError:
        return ""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        found = read_complete(folder)
        if found is None and not (folder / FILES).exists() and not (folder / ARCHIVE).exists():
            return ""
        Entry(folder).clear()  # the lock's file stays: a process may wait for it
    except OSError:
        return ""
    finally:
        os.close(descriptor)
    return found.uri if found is not None else folder.name
