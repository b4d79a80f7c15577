"""What is cut here is the same there, whatever the order of its folders."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from e2e.gpu import parts, prepare
from e2e.gpu.settings import ARCHIVES


def test_site_without_a_package_is_refused(tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    with pytest.raises(FileNotFoundError, match="lacks the package nixl"):
        prepare.check_site(tmp_path)
    (tmp_path / "nixl").mkdir()
    prepare.check_site(tmp_path)


def test_archives_come_out_as_they_went_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "node"
    monkeypatch.setattr(parts, "ROOT", root)
    monkeypatch.setattr(parts, "PARTS", root / "parts")
    monkeypatch.setattr(parts, "PIECE_BYTES", 2_000_000)
    monkeypatch.setattr(parts, "_read_ahead", lambda: None)
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "zstd").write_bytes(Path("/usr/bin/zstd").read_bytes())
    (tools / "liblz4.so.1").write_bytes(b"")
    archives = {}
    for number, name in enumerate(ARCHIVES):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "content").write_bytes(bytes(range(256)) * 4000 * (number + 1))
        archives[name] = tmp_path / f"{name}.tar.zst"
        tar = ["tar", "-I", "zstd -1 -q --no-compress-literals", "-C", str(folder), "-cf", str(archives[name]), "."]
        subprocess.run(tar, check=True)
    folders = parts.send(archives, tools, tmp_path / "carry")
    started: list[subprocess.Popen[bytes]] = []
    monkeypatch.setattr(
        parts, "start", lambda _name, argv, *, ends: started.append(subprocess.Popen(argv)) if ends else None
    )
    monkeypatch.setattr(parts, "_unpack", lambda name, pieces: f"cat {' '.join(pieces)} > {tmp_path}/{name}.back")
    for folder in reversed(folders):
        parts.receive(folder)
    assert [process.wait(30) for process in started] == [0, 0, 0]
    for name, path in archives.items():
        assert (tmp_path / f"{name}.back").read_bytes() == path.read_bytes()
    for folder in folders:
        pieces = [path for path in folder.iterdir() if path.name != "manifest.json"]
        assert sum(path.stat().st_size for path in pieces) <= 2_000_000
