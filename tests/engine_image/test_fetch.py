"""Downloads of models into the cache, from stores that break, change and stay away."""

from __future__ import annotations

import concurrent.futures
import hashlib
import io
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from launcher import fetch, model_cache, model_config
from launcher.model_cache import ModelCache
from launcher.model_source import ModelSource, Opened, RemoteFile, SourceError, TransientError, files_digest
from launcher.startup_phases import StartupPhases, phase_order
from tests.engine_image.middleware_harness import CONTRACT

FILES = {"config.json": b"{}", "weights/model-1.safetensors": b"w" * 3_000_000, "a file+1.txt": b""}
SHA256S = {path: hashlib.sha256(content).hexdigest() for path, content in FILES.items()}
DIGEST = files_digest(SHA256S)
URI = "s3://models/team/chat"


@dataclass
class MemoryStore:
    """A store in memory. breaks: bytes after which each answer ends; down: requests that fail; asked: all opens."""

    contents: dict[str, bytes]
    breaks: int = 1 << 40
    down: int = 0
    sha256s: dict[str, str] = field(default_factory=dict)
    listed: int = 0
    requests: list[tuple[str, int]] = field(default_factory=list)

    def files(self) -> list[RemoteFile]:
        self.listed += 1
        self._fail()
        return [RemoteFile(path, len(body), f'"{hash(body)}"') for path, body in self.contents.items()]

    def open(self, file: RemoteFile, offset: int) -> Opened:
        self.requests.append((file.path, offset))
        self._fail()
        body = self.contents[file.path][offset : offset + self.breaks]
        return Opened(io.BytesIO(body), self.sha256s.get(file.path, ""))

    def _fail(self) -> None:
        if self.down:
            self.down -= 1
            raise TransientError("the store answers 503")


def fetched(store: MemoryStore, folder: Path, digest: str = "", uri: str = URI) -> model_cache.Entry:
    return fetch.fetch(ModelSource(uri, digest), store, ModelCache(folder), pause=lambda _: None)


def contents(entry: model_cache.Entry) -> dict[str, bytes]:
    return {p.relative_to(entry.files).as_posix(): p.read_bytes() for p in entry.files.rglob("*") if p.is_file()}


def test_files_and_digest_are_those_of_the_store(tmp_path: Path) -> None:
    entry = fetched(MemoryStore(dict(FILES)), tmp_path, DIGEST)
    assert contents(entry) == FILES
    found = entry.complete()
    assert found is not None
    assert found.digest == DIGEST
    assert found.files["config.json"] == (2, SHA256S["config.json"])


def test_digest_is_what_sha256sum_says(tmp_path: Path) -> None:
    entry = fetched(MemoryStore(dict(FILES)), tmp_path)
    command = r"find . -type f -printf '%P\0' | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum"
    out = subprocess.run(["sh", "-c", command], cwd=entry.files, capture_output=True, text=True, check=True).stdout
    assert f"sha256:{out.split()[0]}" == DIGEST


def test_complete_model_is_not_downloaded_again(tmp_path: Path) -> None:
    store = MemoryStore(dict(FILES))
    first, second = fetched(store, tmp_path), fetched(store, tmp_path)
    assert first.name == second.name
    assert len(store.requests) == len([body for body in FILES.values() if body])


def test_pinned_model_in_the_cache_needs_no_store(tmp_path: Path) -> None:
    fetched(MemoryStore(dict(FILES)), tmp_path)
    absent = MemoryStore({}, down=99)
    assert contents(fetched(absent, tmp_path, DIGEST)) == FILES
    assert absent.listed == 0


def test_other_digest_is_refused_and_not_kept(tmp_path: Path) -> None:
    other = "sha256:" + "0" * 64
    for _ in range(2):
        with pytest.raises(SourceError, match=rf"has digest {DIGEST}, and spec.model.digest is {other}"):
            fetched(MemoryStore(dict(FILES)), tmp_path, other)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_changed_model_is_another_version(tmp_path: Path) -> None:
    first = fetched(MemoryStore(dict(FILES)), tmp_path)
    second = fetched(MemoryStore({**FILES, "config.json": b"[]"}), tmp_path)
    assert first.name != second.name
    assert contents(first) == FILES


def test_broken_download_goes_on_where_it_ended(tmp_path: Path) -> None:
    store = MemoryStore({"w": b"0123456789"}, breaks=4)
    assert contents(fetched(store, tmp_path)) == {"w": b"0123456789"}
    assert store.requests == [("w", 0), ("w", 4), ("w", 8)]


def test_download_of_an_ended_process_is_gone_on_with(tmp_path: Path) -> None:
    class Cut(MemoryStore):
        def open(self, file: RemoteFile, offset: int) -> Opened:
            if offset:
                raise KeyboardInterrupt
            return super().open(file, offset)

    with pytest.raises(KeyboardInterrupt):
        fetched(Cut({"w": b"0123456789"}, breaks=4), tmp_path)
    store = MemoryStore({"w": b"0123456789"})
    assert contents(fetched(store, tmp_path)) == {"w": b"0123456789"}
    assert store.requests == [("w", 4)]


def test_store_that_stays_away_is_the_reason(tmp_path: Path) -> None:
    store = MemoryStore(dict(FILES), down=99)
    with pytest.raises(SourceError, match="the store answers 503"):
        fetched(store, tmp_path)
    assert store.listed == fetch.ATTEMPTS


def test_bytes_that_differ_from_the_stores_checksum_are_refused(tmp_path: Path) -> None:
    store = MemoryStore({"w": b"abc"}, sha256s={"w": "f" * 64})
    with pytest.raises(SourceError, match=r"w has SHA-256 ba78.*and the store says fff"):
        fetched(store, tmp_path)
    assert not list(tmp_path.rglob("w*"))


@pytest.mark.parametrize("path", ["../x", "/etc/x", "a/../../x", "a\\b"])
def test_name_that_leaves_the_folder_is_refused(tmp_path: Path, path: str) -> None:
    with pytest.raises(SourceError, match="which is no path in a folder"):
        fetched(MemoryStore({path: b"x"}), tmp_path)


def test_two_processes_download_once(tmp_path: Path) -> None:
    class Slow(MemoryStore):
        def open(self, file: RemoteFile, offset: int) -> Opened:
            begun.set()
            assert second_waits.wait(60)
            return super().open(file, offset)

    begun, second_waits = threading.Event(), threading.Event()
    store, other = Slow({"w": b"abc"}), MemoryStore({"w": b"abc"})
    first = threading.Thread(target=fetched, args=(store, tmp_path))
    first.start()
    assert begun.wait(60)
    second = threading.Thread(target=fetched, args=(other, tmp_path))
    second.start()
    second_waits.set()
    first.join(60)
    second.join(60)
    assert (len(store.requests), len(other.requests)) == (1, 0)


def test_pinned_model_deleted_meanwhile_is_downloaded_again(tmp_path: Path) -> None:
    class Raced(ModelCache):
        def find(self, uri: str, digest: str) -> model_cache.Entry | None:
            if (found := super().find(uri, digest)) is not None:
                found.clear()
            return found

    fetched(MemoryStore(dict(FILES)), tmp_path)
    _release_locks(tmp_path)
    again = threading.Thread(
        target=fetch.fetch, args=(ModelSource(URI, DIGEST), MemoryStore(dict(FILES)), Raced(tmp_path)), daemon=True
    )
    again.start()
    again.join(60)
    assert not again.is_alive()


def _volume(folder: Path, size: int) -> ModelCache:
    """A cache on a volume of `size` bytes, of which model files take their part."""
    return ModelCache(folder, lambda _: size - sum(p.stat().st_size for p in folder.rglob("files/**/*") if p.is_file()))


def test_unused_models_make_room_oldest_first(tmp_path: Path) -> None:
    cache = _volume(tmp_path, 25)
    entries = [_ten_bytes(cache, f"s3://b/{name}") for name in "ab"]
    for age, entry in enumerate(entries):
        os.utime(entry.files.parent / model_cache.COMPLETE, (1000 - age, 1000 - age))  # b was used before a
    compiled = tmp_path / ".compiled" / "vllm"
    compiled.mkdir(parents=True)
    _release_locks(tmp_path)
    _ten_bytes(cache, "s3://b/c")
    assert entries[0].complete() is not None
    assert entries[1].complete() is None
    assert compiled.exists()


def test_models_in_use_stay_and_the_need_is_named(tmp_path: Path) -> None:
    cache = _volume(tmp_path, 15)
    used = _ten_bytes(cache, "s3://b/a")
    with pytest.raises(SourceError, match=r"needs 0.0 GB.*enlarge the volume of spec.model.cache"):
        _ten_bytes(cache, "s3://b/b")
    assert used.complete() is not None


def test_bound_of_the_cache_deletes_unused_models_and_is_named(tmp_path: Path) -> None:
    cache = ModelCache(tmp_path, lambda _: 10**9, max_bytes=25)
    entries = [_ten_bytes(cache, f"s3://b/{name}") for name in "ab"]
    for age, entry in enumerate(entries):
        os.utime(entry.files.parent / model_cache.COMPLETE, (1000 - age, 1000 - age))  # b was used before a
    with pytest.raises(SourceError, match=r"models in use leave .* GB of the node's cache: enlarge engine.nodeCache.s"):
        fetch.fetch(ModelSource("s3://b/c"), MemoryStore({"w": bytes(20)}), cache)
    _release_locks(tmp_path)
    _ten_bytes(cache, "s3://b/c")
    assert [entry.complete() is not None for entry in entries] == [True, False]


@dataclass
class HaltedStore(MemoryStore):
    """A store whose first answer ends when the test lets it."""

    opened: threading.Event = field(default_factory=threading.Event)
    goes_on: threading.Event = field(default_factory=threading.Event)

    def open(self, file: RemoteFile, offset: int) -> Opened:
        self.opened.set()
        assert self.goes_on.wait(60)
        return super().open(file, offset)


@contextmanager
def _download_under_way(cache: ModelCache, size: int) -> Iterator[HaltedStore]:
    """A download of `size` bytes by another thread, of which none has come yet; complete at the end."""
    store = HaltedStore({"w": bytes(size)})
    with concurrent.futures.ThreadPoolExecutor(1) as worker:
        job = worker.submit(fetch.fetch, ModelSource("s3://b/slow"), store, cache)
        assert store.opened.wait(60)
        try:
            yield store
        finally:
            store.goes_on.set()
        assert job.result(60).complete() is not None


@pytest.mark.parametrize("bounded", [True, False])
def test_room_of_a_download_under_way_is_reserved(tmp_path: Path, bounded: bool) -> None:
    cache = ModelCache(tmp_path, lambda _: 10**9, max_bytes=25) if bounded else _volume(tmp_path, 25)
    remedy = "engine.nodeCache.size" if bounded else "the volume of spec.model.cache"
    with _download_under_way(cache, 20):
        with pytest.raises(SourceError, match=rf"a download under way \(s3://b/slow\).*enlarge {remedy}"):
            _ten_bytes(cache, "s3://b/other")
        fetch.fetch(ModelSource("s3://b/small"), MemoryStore({"w": bytes(5)}), cache)
    assert _file_bytes(tmp_path) == 25


def test_download_that_broke_off_reserves_nothing(tmp_path: Path) -> None:
    cache = ModelCache(tmp_path, lambda _: 10**9, max_bytes=25)
    with pytest.raises(SourceError):
        fetch.fetch(ModelSource("s3://b/x"), MemoryStore({"w": bytes(20)}, breaks=0), cache, pause=lambda _: None)
    assert _ten_bytes(cache, "s3://b/other").complete() is not None


def test_downloads_of_several_processes_stay_within_the_bound(tmp_path: Path) -> None:
    """Each of eight processes wants 10 MB of 35 MB, at the same moment."""
    script = f"""
import sys
from launcher import fetch, model_cache, model_source
from tests.engine_image.test_fetch import MemoryStore
cache = model_cache.ModelCache(__import__("pathlib").Path({str(tmp_path)!r}), lambda _: 10**12, max_bytes=35_000_000)
class Held(MemoryStore):
    def open(self, file, offset):
        print("opens", flush=True)
        sys.stdin.readline()
        return super().open(file, offset)
print("starts", flush=True)
sys.stdin.readline()
try:
    fetch.fetch(model_source.ModelSource(sys.argv[1]), Held({{"w": bytes(10_000_000)}}), cache)
    print("done", flush=True)
except model_source.SourceError as error:
    print(error, flush=True)
sys.stdin.readline()
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, f"s3://b/{number}"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )
        for number in range(8)
    ]  # fmt: skip
    try:
        assert [_line(process) for process in processes] == ["starts"] * 8
        for process in processes:
            _go_on(process)
        answers = [_line(process) for process in processes]  # all have reserved room before one has a file
        admitted = [process for process, answer in zip(processes, answers, strict=True) if answer == "opens"]
        for process in admitted:
            _go_on(process)
        assert [_line(process) for process in admitted] == ["done"] * 3
        assert _file_bytes(tmp_path) == 30_000_000
        refused = [answer for answer in answers if answer != "opens"]
        assert len(refused) == 5
        assert all("GB of the node's cache" in answer for answer in refused)
    finally:
        for process in processes:
            process.communicate("\n", timeout=60)


def test_program_after_the_download_keeps_its_model(tmp_path: Path) -> None:
    script = f"""
import os, pathlib, sys
from launcher import fetch, model_cache, model_source
from tests.engine_image.test_fetch import MemoryStore
cache = model_cache.ModelCache(pathlib.Path({str(tmp_path)!r}))
fetch.fetch(model_source.ModelSource("s3://b/kept"), MemoryStore({{"w": bytes(20)}}), cache)
os.execvp(sys.executable, [sys.executable, "-c", "print('runs', flush=True); input()"])
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    cache = ModelCache(tmp_path, lambda _: 10**9, max_bytes=25)
    try:
        assert _line(process) == "runs"
        with pytest.raises(SourceError, match=r"models in use leave 0.0 GB of the node's cache: enlarge"):
            _ten_bytes(cache, "s3://b/other")
    finally:
        process.communicate("\n", timeout=60)
    assert _ten_bytes(cache, "s3://b/other").complete() is not None


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().rstrip("\n")


def _go_on(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def _file_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("files/**/*") if path.is_file())


def _ten_bytes(cache: ModelCache, uri: str) -> model_cache.Entry:
    return fetch.fetch(ModelSource(uri), MemoryStore({"w": bytes(10)}), cache)


def _release_locks(folder: Path) -> None:
    """Close the descriptors of this process on locks, as its end would."""
    locks = {os.stat(path).st_ino for path in folder.rglob(model_cache.LOCK)}
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.fstat(int(name)).st_ino in locks:
                os.close(int(name))
        except OSError:
            continue


def test_phase_download_comes_before_the_imports() -> None:
    times = StartupPhases(phase_order(CONTRACT.startup_phases, fetched=True), 100.0)
    times.end("launch", 101.0)
    assert times.current(103.0) == ("download", 2.0)
    times.observe(b"(fetch) INFO model files are complete: digest sha256:1\n", 110.0)
    times.observe(b"INFO Initializing a V1 LLM engine (v1)\n", 114.0)
    assert times.seconds() == {"launch": 1.0, "download": 9.0, "import": 4.0}
    assert phase_order(CONTRACT.startup_phases, fetched=False) == CONTRACT.startup_phases


def test_revision_is_the_digest_or_the_commit(tmp_path: Path) -> None:
    entry = fetched(MemoryStore(dict(FILES)), tmp_path)
    fetch.link(entry.files, tmp_path / "model")
    assert model_config.revision(str(tmp_path / "model"), "", {}) == DIGEST
    refs = tmp_path / "hub" / "models--org--name" / "refs"
    refs.mkdir(parents=True)
    (refs / "main").write_text("c" * 40)
    home = {"HF_HOME": str(tmp_path)}
    assert model_config.revision("org/name", "", home) == "c" * 40
    assert model_config.revision("org/name", "d" * 40, home) == "d" * 40
    assert model_config.revision("org/name", "v1", home) is None
