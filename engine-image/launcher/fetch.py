"""Downloads the model of an s3://, gs:// or https:// URI into the cache, then becomes the engine.

python3 -m launcher.fetch [PROGRAM ARGUMENT ...]      without a program it ends then, also for hf:// models

Problem: a download takes minutes, breaks off, and may deliver other bytes than were meant. Idea: it is a step of its
own before the engine, in the engine's process: the launcher's health checks, log and signals apply to it. Each file
goes on where it broke off. Its size, and the SHA-256 that the store may know, are checked, and the model's digest at
the end. Then a link leads to the files, and `exec` starts the program.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import http.client
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Final

from launcher import web_archive
from launcher.contract import Contract, load
from launcher.model_cache import Complete, Entry, ModelCache
from launcher.model_source import (
    ModelSource,
    RemoteFile,
    SourceError,
    Store,
    TransientError,
    files_digest,
    fingerprint,
)
from launcher.object_store import open_store
from launcher.redaction import redact
from launcher.store_credentials import SECRET_VARIABLES

WORKERS: Final = 8
ATTEMPTS: Final = 6  # without a byte in between
FIRST_PAUSE_SECONDS: Final = 1.0  # doubled after each attempt
HUB_IGNORED: Final = ["*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "original/*"]
CHUNK_BYTES: Final = 4 << 20
FAILED: Final = 3  # exit code
_BROKEN: Final = (OSError, http.client.HTTPException, TransientError)

log = logging.getLogger("fetch")
Pause = Callable[[float], None]


def fetch(source: ModelSource, store: Store, cache: ModelCache, pause: Pause = time.sleep) -> Entry:
    """Return the model's entry in the cache, complete and locked while this process lives; raises SourceError."""
    if source.digest and (found := cache.find(source.uri, source.digest)) is not None:
        descriptor = cache.lock(found, shared=True)
        if found.complete() is not None:
            return found
        os.close(descriptor)  # another pod has deleted it meanwhile; two locks of one process exclude each other
    files = _again(store.files, pause)
    _check_paths(files)
    entry = cache.entry(fingerprint(source.uri, files))
    while True:
        descriptor = cache.lock(entry, shared=True)
        try:
            if (present := entry.complete()) is not None:
                _check_digest(source, present.digest)
                return entry
        except SourceError:
            os.close(descriptor)
            raise
        os.close(descriptor)
        descriptor = cache.lock(entry, shared=False)
        try:
            if entry.complete() is None:
                _download(source, store, files, cache, entry, pause)
        finally:
            os.close(descriptor)


def _check_paths(files: list[RemoteFile]) -> None:
    """Refuse names that would leave the folder."""
    for file in files:
        path = PurePosixPath(file.path)
        if path.is_absolute() or ".." in path.parts or "\\" in file.path or "\0" in file.path:
            raise SourceError(f"the model has a file with the name {file.path!r}, which is no path in a folder")


def _check_digest(source: ModelSource, digest: str) -> None:
    if source.digest and source.digest != digest:
        raise SourceError(
            f"{source.uri} has digest {digest}, and spec.model.digest is {source.digest}: the model was changed, "
            "or the digest is of another one"
        )


def _download(
    source: ModelSource, store: Store, files: list[RemoteFile], cache: ModelCache, entry: Entry, pause: Pause
) -> None:
    """Download all files of the model, check them, and finish the entry."""
    began, total = time.monotonic(), sum(file.size for file in files)
    entry.reopen()
    is_archive = source.scheme == "https"
    folder = entry.archive if is_archive else entry.files
    cache.reserve(total * (2 if is_archive else 1), source.uri, entry)
    log.info("downloading %s: %d files, %.2f GB", source.uri, len(files), total / 1e9)
    with concurrent.futures.ThreadPoolExecutor(WORKERS) as workers:
        jobs = {file.path: workers.submit(_download_file, store, file, folder, pause) for file in files}
        try:
            sha256s = {path: job.result() for path, job in jobs.items()}
        except BaseException:
            workers.shutdown(wait=True, cancel_futures=True)
            raise
    digest = f"sha256:{sha256s[web_archive.ARCHIVE]}" if is_archive else files_digest(sha256s)
    try:
        _check_digest(source, digest)
    except SourceError:
        entry.clear()  # else the same bytes would be checked again at each start
        raise
    if is_archive:
        sha256s = _unpack(entry)
    sizes = {path: (entry.files / path).stat().st_size for path in sha256s}
    entry.finish(Complete(source.uri, digest, {path: (sizes[path], sha256) for path, sha256 in sha256s.items()}))
    seconds = max(time.monotonic() - began, 1e-3)
    log.info("downloaded in %.1f s, %.0f MB/s", seconds, total / seconds / 1e6)


def _unpack(entry: Entry) -> dict[str, str]:
    """Unpack the archive; returns the files without checksums, because the archive's own covers them."""
    web_archive.unpack(entry.archive / web_archive.ARCHIVE, entry.files)
    shutil.rmtree(entry.archive, ignore_errors=True)
    return {path.relative_to(entry.files).as_posix(): "" for path in entry.files.rglob("*") if path.is_file()}


def _download_file(store: Store, file: RemoteFile, folder: Path, pause: Pause) -> str:
    """Download one file, unless it is there, and return its SHA-256. A part of an earlier download is gone on with."""
    place = folder / file.path
    place.parent.mkdir(parents=True, exist_ok=True)
    if place.is_file() and place.stat().st_size == file.size:
        return _hash_of(place).hexdigest()
    part = place.with_name(f"{place.name}.part")
    digest = _hash_of(part) if part.is_file() and part.stat().st_size <= file.size else hashlib.sha256()
    at = part.stat().st_size if part.is_file() and part.stat().st_size <= file.size else 0
    expected = ""
    with part.open("r+b" if at else "wb") as out:
        out.seek(at)
        attempt = 0
        while at < file.size:
            before = at
            try:
                opened = store.open(file, at)
                expected = opened.sha256 or expected
                with contextlib.closing(opened.body):
                    while at < file.size and (chunk := opened.body.read(min(CHUNK_BYTES, file.size - at))):
                        out.write(chunk)
                        digest.update(chunk)
                        at += len(chunk)
                reason = f"{file.path} ends after {at} of {file.size} bytes"
            except _BROKEN as error:
                _raise_if_disk_is_full(error)
                reason = f"{file.path} breaks off after {at} of {file.size} bytes: {error}"
            if at < file.size:
                attempt = 1 if at > before else attempt + 1
                if attempt >= ATTEMPTS:
                    raise SourceError(reason)
                log.warning("%s; trying again", reason)
                pause(FIRST_PAUSE_SECONDS * 2 ** (attempt - 1))
        out.flush()
        os.fsync(out.fileno())
    if expected and expected != digest.hexdigest():
        part.unlink()
        raise SourceError(f"{file.path} has SHA-256 {digest.hexdigest()}, and the store says {expected}")
    part.rename(place)
    return digest.hexdigest()


def _raise_if_disk_is_full(error: Exception) -> None:
    if isinstance(error, OSError) and error.errno in (28, 122):  # ENOSPC, EDQUOT
        raise SourceError(f"the model cache is full: enlarge the volume of spec.model.cache ({error.strerror})")


def _hash_of(path: Path) -> hashlib._Hash:
    """Return the SHA-256 of a file so far."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest


def _again(call: Callable[[], list[RemoteFile]], pause: Pause) -> list[RemoteFile]:
    for attempt in range(ATTEMPTS - 1):
        try:
            return call()
        except TransientError as error:
            log.warning("%s; trying again", error)
            pause(FIRST_PAUSE_SECONDS * 2**attempt)
    try:
        return call()
    except TransientError as error:
        raise SourceError(str(error)) from None


def store_of(source: ModelSource, environment: Mapping[str, str], contract: Contract) -> Store:
    """The store of a source."""
    if source.scheme == "https":
        return web_archive.WebArchive(source, environment.get(contract.env["model_token"], "").strip())
    return open_store(source, environment)


def source_of(environment: Mapping[str, str], contract: Contract) -> ModelSource | None:
    """The source that the operator set; None if the engine finds its model itself."""
    uri = environment.get(contract.env["model_source"], "")
    return ModelSource(uri, environment.get(contract.env["model_digest"], "")) if uri else None


def _download_from_hub(environment: Mapping[str, str], contract: Contract) -> None:
    """Download a Hugging Face model into its own cache, as the engine will look for it."""
    from huggingface_hub import snapshot_download  # an engine image has it; other sources do not need it

    logging.getLogger("httpx").setLevel(logging.WARNING)
    model, revision = environment[contract.env["model"]], environment.get(contract.env["model_revision"], "")
    snapshot_download(model, revision=revision or None, ignore_patterns=HUB_IGNORED)


def link(target: Path, place: Path) -> None:
    """Make a link to the model's files, in place of an earlier one."""
    fresh = place.with_name(f"{place.name}.new")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(target)
    fresh.rename(place)


def main(program: list[str], environment: Mapping[str, str] = os.environ) -> int:
    """Download the model and start the program; returns the exit code if that fails, or without a program."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="(fetch) %(levelname)s %(message)s")
    contract = load(environment)
    source = source_of(environment, contract)
    if source is not None:
        try:
            bound = environment.get(contract.env["model_cache_bytes"])
            cache = ModelCache(Path(contract.paths["model_cache"]), max_bytes=int(bound) if bound else None)
            entry = fetch(source, store_of(source, environment, contract), cache)
        except (SourceError, OSError) as error:
            # The form of an error in the engine's log, which the launcher reports as the cause.
            print(redact(f"ModelSourceError: {error}"), file=sys.stderr, flush=True)
            return FAILED
        entry.mark_used()
        complete = entry.complete()
        log.info("model files are complete: digest %s", complete.digest if complete else "unknown")
        link(entry.files, Path(contract.paths["model_link"]))
    if not program:
        if source is None:
            _download_from_hub(environment, contract)
        return 0
    secrets = (*SECRET_VARIABLES, contract.env["model_token"]) if source is not None else ()
    os.execvpe(program[0], program, {name: value for name, value in environment.items() if name not in secrets})
    return FAILED  # never: the program has taken this process over


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
