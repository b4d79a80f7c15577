"""A certificate and its key from a mounted Secret: read together, and checked before anybody uses them."""

from __future__ import annotations

import os
import ssl
import subprocess
from pathlib import Path

import pytest

from plimsoll.adapters.certificate_files import (
    AUTHORITY_FILE,
    CERTIFICATE_FILE,
    KEY_FILE,
    InvalidCertificate,
    load_authority,
    load_pair,
)
from tests.certificates import Authority, SecretVolume, make_certificate


def volume(tmp_path: Path) -> SecretVolume:
    return SecretVolume(tmp_path / "tls")


def test_load_pair_reads_mounted_secret(tmp_path: Path) -> None:
    mounted = volume(tmp_path)
    pem = mounted.rotate(days=30)
    pair = load_pair(mounted.directory)
    shown = subprocess.run(
        ["openssl", "x509", "-noout", "-enddate"], input=pem, capture_output=True, text=True, check=True
    ).stdout
    assert pair.certificate.decode() == pem
    assert pair.expires_s == ssl.cert_time_to_seconds(shown.strip().partition("=")[2])
    assert "PRIVATE" not in repr(pair)


def test_load_pair_equals_after_rewrite_of_same_files(tmp_path: Path) -> None:
    mounted = volume(tmp_path)
    mounted.rotate()
    first = load_pair(mounted.directory)
    mounted.write({CERTIFICATE_FILE: first.certificate, KEY_FILE: first.key})
    second = load_pair(mounted.directory)
    assert first == second
    assert first.directory != second.directory
    mounted.rotate()
    assert load_pair(mounted.directory) != second


def test_load_pair_swapped_between_files_stays_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The link changes after the certificate is read: both files are of one version."""
    mounted = volume(tmp_path)
    pem, read = mounted.rotate(), Path.open

    def swap(path: Path, *mode: str) -> object:
        file = read(path, *mode)  # type: ignore[call-overload]
        if path.name == CERTIFICATE_FILE and (other := mounted.directory / "..9").exists():
            (mounted.directory / "..data_tmp").symlink_to(other.name)
            os.rename(mounted.directory / "..data_tmp", mounted.directory / "..data")
        return file

    (mounted.directory / "..9").mkdir()
    make_certificate(mounted.directory / "..9", "other")
    monkeypatch.setattr(Path, "open", swap)
    assert load_pair(mounted.directory).certificate.decode() == pem
    assert load_pair(mounted.directory).certificate.decode() != pem


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({CERTIFICATE_FILE: None}, "tls.crt cannot be read: No such file"),
        ({KEY_FILE: None}, "tls.key cannot be read: No such file"),
        ({CERTIFICATE_FILE: b" "}, "tls.crt is empty"),
        ({CERTIFICATE_FILE: b"garbage"}, "tls.crt holds no X.509 certificate"),
        ({KEY_FILE: b"garbage"}, "cannot be used together"),
    ],
)
def test_load_pair_names_what_is_wrong(tmp_path: Path, files: dict[str, bytes | None], message: str) -> None:
    make_certificate(tmp_path)
    for name, content in files.items():
        if content is None:
            (tmp_path / name).unlink()
        else:
            (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidCertificate, match=message):
        load_pair(tmp_path)


def test_load_pair_rejects_key_of_other_certificate(tmp_path: Path) -> None:
    make_certificate(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    make_certificate(other)
    (tmp_path / KEY_FILE).write_bytes((other / KEY_FILE).read_bytes())
    with pytest.raises(InvalidCertificate, match="key values mismatch"):
        load_pair(tmp_path)


def test_load_pair_rejects_encrypted_key(tmp_path: Path) -> None:
    make_certificate(tmp_path)
    key, encrypted = tmp_path / KEY_FILE, tmp_path / "encrypted"
    command = ["openssl", "pkey", "-in", str(key), "-aes256", "-passout", "pass:secret", "-out", str(encrypted)]
    subprocess.run(command, check=True, capture_output=True)
    os.replace(encrypted, key)
    with pytest.raises(InvalidCertificate, match=r"tls\.key is encrypted"):
        load_pair(tmp_path)


def test_load_authority_takes_comments_in_any_language(tmp_path: Path) -> None:
    """Bundles of authorities, such as Mozilla's, have the names of the authorities in UTF-8."""
    bundle = "# Főtanúsítvány\n".encode() + Authority(tmp_path / "ca", "test").pem
    (tmp_path / AUTHORITY_FILE).write_bytes(bundle)
    assert load_authority(tmp_path) == bundle


@pytest.mark.parametrize("content", [b"garbage", b"\xff\xfe\x00", "é".encode()])
def test_load_authority_without_certificate_is_invalid(tmp_path: Path, content: bytes) -> None:
    (tmp_path / AUTHORITY_FILE).write_bytes(content)
    with pytest.raises(InvalidCertificate, match=r"ca\.crt has no certificate"):
        load_authority(tmp_path)
