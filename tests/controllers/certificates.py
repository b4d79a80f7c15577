"""Certificates for tests of the webhook: self-signed, for 127.0.0.1."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from plimsoll.controllers.webhook.certificate import CERTIFICATE_FILE, KEY_FILE


def make_certificate(folder: Path, name: str = "test", days: int = 30) -> str:
    """Write certificate and key, as kubelet writes a Secret; returns the certificate in PEM."""
    openssl = shutil.which("openssl")
    assert openssl, "openssl is missing"
    command = [
        *(openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
        *("-days", str(days), "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"),
        *("-keyout", str(folder / KEY_FILE), "-out", str(folder / CERTIFICATE_FILE)),
    ]
    subprocess.run(command, check=True, capture_output=True)
    return (folder / CERTIFICATE_FILE).read_text()
