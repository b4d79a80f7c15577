"""Certificates for tests: self-signed, for 127.0.0.1, in a directory as the kubelet mounts a Secret."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from plimsoll.adapters.certificate_files import AUTHORITY_FILE, CERTIFICATE_FILE, KEY_FILE

P256 = ("ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")


def make_certificate(folder: Path, name: str = "test", days: int = 30, algorithm: tuple[str, ...] = P256) -> str:
    """Write certificate and key; returns the certificate in PEM."""
    openssl = shutil.which("openssl")
    assert openssl, "openssl is missing"
    command = [
        *(openssl, "req", "-x509", "-newkey", *algorithm, "-nodes"),
        *("-days", str(days), "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"),
        *("-keyout", str(folder / KEY_FILE), "-out", str(folder / CERTIFICATE_FILE)),
    ]
    subprocess.run(command, check=True, capture_output=True)
    return (folder / CERTIFICATE_FILE).read_text()


class Authority:
    """A certificate authority in `folder`."""

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir(parents=True)
        self._folder = folder
        self._run("req", "-x509", "-newkey", *P256, "-nodes", "-days", "30", "-subj", f"/CN={name}",
                  "-addext", "basicConstraints=critical,CA:TRUE", "-addext", "keyUsage=critical,keyCertSign,cRLSign",
                  "-keyout", "ca.key", "-out", AUTHORITY_FILE)  # fmt: skip

    @property
    def pem(self) -> bytes:
        return (self._folder / AUTHORITY_FILE).read_bytes()

    def issue(self, dns_name: str, days: int = 30, usages: str = "serverAuth,clientAuth") -> dict[str, bytes]:
        """A Secret's files: certificate and key, and this authority. days < 0: expired."""
        (self._folder / "extensions").write_text(f"subjectAltName=DNS:{dns_name}\nextendedKeyUsage={usages}\n")
        self._run("req", "-newkey", *P256, "-nodes", "-subj", "/CN=peer", "-keyout", KEY_FILE, "-out", "request")
        self._run("x509", "-req", "-in", "request", "-CA", AUTHORITY_FILE, "-CAkey", "ca.key", "-CAcreateserial",
                  "-extfile", "extensions", "-out", CERTIFICATE_FILE, "-days", str(days))  # fmt: skip
        return {name: (self._folder / name).read_bytes() for name in (CERTIFICATE_FILE, KEY_FILE, AUTHORITY_FILE)}

    def _run(self, *arguments: str) -> None:
        openssl = shutil.which("openssl")
        assert openssl, "openssl is missing"
        subprocess.run([openssl, *arguments], check=True, capture_output=True, cwd=self._folder)


class SecretVolume:
    """A directory that the kubelet writes: links to files in `..data`, a link that is swapped on each change."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._version = 0
        directory.mkdir()

    def write(self, files: dict[str, bytes]) -> None:
        """Replace all files at once, and remove those of before."""
        before = self.directory / f"..{self._version}"
        self._version += 1
        version = self.directory / f"..{self._version}"
        version.mkdir()
        for name, content in files.items():
            (version / name).write_bytes(content)
        (self.directory / "..data_tmp").symlink_to(version.name)
        os.rename(self.directory / "..data_tmp", self.directory / "..data")
        for name in files:
            if not (self.directory / name).is_symlink():
                (self.directory / name).symlink_to(Path("..data") / name)
        shutil.rmtree(before, ignore_errors=True)

    def rotate(self, name: str = "test", days: int = 30, algorithm: tuple[str, ...] = P256) -> str:
        """Write a new certificate with its key; returns the certificate in PEM."""
        scratch = self.directory / ".scratch"
        scratch.mkdir()
        pem = make_certificate(scratch, name, days, algorithm)
        self.write({file: (scratch / file).read_bytes() for file in (CERTIFICATE_FILE, KEY_FILE)})
        shutil.rmtree(scratch)
        return pem
