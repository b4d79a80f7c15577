"""The krew plugin of a release: an archive with the command line, and the manifest that names it.

Problem: krew unpacks an archive and links to one program in it, and the command line is a Python package with compiled
dependencies. Idea: one archive for all platforms holds the package, the locked requirements and a script that installs
them at its first call. The same files give the same archive, byte for byte.

    python3 -m release.krew VERSION URL FOLDER

writes both into FOLDER. URL is where the release has its files.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
PROGRAM: Final = "kubectl-plimsoll"
_FILES: Final = {"LICENSE": "LICENSE", "requirements.txt": "requirements/operator.txt", PROGRAM: f"release/{PROGRAM}"}
_IGNORED: Final = {"__pycache__"}

_MANIFEST: Final = """\
apiVersion: krew.googlecontainertools.github.com/v1alpha2
kind: Plugin
metadata:
  name: plimsoll
spec:
  version: v{version}
  homepage: {homepage}
  shortDescription: Plan, check and explain LLM inference services
  description: |
    The command line of Plimsoll, an operator that serves LLMs on Kubernetes within a latency SLO. It plans GPUs, checks
    a cluster, finds engines that run already, shows load, and explains scaling decisions.
  caveats: |
    It needs Python 3.11 or newer. Its first call installs Python packages into the folder of the user's caches.
  platforms:
    - selector:
        matchExpressions:
          - {{key: os, operator: In, values: [darwin, linux]}}
      uri: {uri}
      sha256: {sha256}
      bin: {program}
"""


def archive(version: str) -> bytes:
    """The plugin's files as a tar with gzip."""
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w", format=tarfile.USTAR_FORMAT) as made:
        for name, content in (("VERSION", f"{version}\n".encode()), *_content()):
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(content), 0o755 if name == PROGRAM else 0o644
            made.addfile(info, io.BytesIO(content))
    return gzip.compress(tar.getvalue(), mtime=0)


def _content() -> Iterator[tuple[str, bytes]]:
    for name, source in sorted(_FILES.items()):
        yield name, (ROOT / source).read_bytes()
    package = ROOT / "operator" / "plimsoll"
    for path in sorted(package.rglob("*")):
        if path.is_file() and _IGNORED.isdisjoint(path.parts):
            yield f"plimsoll/{path.relative_to(package).as_posix()}", path.read_bytes()


def manifest(version: str, url: str, content: bytes) -> str:
    """The plugin's manifest. content: of its archive."""
    return _MANIFEST.format(
        version=version,
        homepage=url.partition("/releases/")[0],
        uri=f"{url}/{archive_name(version)}",
        sha256=hashlib.sha256(content).hexdigest(),
        program=PROGRAM,
    )


def archive_name(version: str) -> str:
    """The name of the archive in a release."""
    return f"{PROGRAM}-{version}.tar.gz"


def main(argv: list[str]) -> int:
    """Write archive and manifest."""
    version, url, folder = argv
    content = archive(version)
    (Path(folder) / archive_name(version)).write_bytes(content)
    (Path(folder) / "krew-plimsoll.yaml").write_text(manifest(version, url.rstrip("/"), content))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
