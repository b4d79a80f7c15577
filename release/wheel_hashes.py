"""Write the SHA-256 of each pinned wheel into lock files that no resolver can make.

Problem: vLLM for the CPU does not declare what it really needs, so its lock files are lists by hand; pip checks hashes
only where each requirement has one. Idea: a package index lists the hash of each file, so nothing is downloaded. Only
wheels for CPython 3.11 on x86-64 Linux count, the one platform of the image.

    python -m release.wheel_hashes [--index URL] LOCK ...

`--index` asks a second index, which has other builds of a version. If it cannot be reached, hashes stay.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import ssl
import sys
import urllib.error
import urllib.request
from html import unescape
from pathlib import Path
from urllib.parse import unquote

from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version
from pip._internal.models.index import PyPI

JSON = "application/vnd.pypi.simple.v1+json"
PLATFORMS = [*(f"manylinux_2_{minor}_x86_64" for minor in range(5, 37)), "manylinux2014_x86_64", "manylinux2010_x86_64"]
PLATFORMS += ["manylinux1_x86_64", "linux_x86_64"]
TAGS: frozenset[Tag] = frozenset(
    [*cpython_tags((3, 11), platforms=PLATFORMS), *compatible_tags((3, 11), "cp311", PLATFORMS)]
)
REQUIREMENT = re.compile(r"^([\w.-]+)==(\S+)((?: \\\n    --hash=sha256:[0-9a-f]{64})*)$", re.MULTILINE)
HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")
LINK = re.compile(r'<a[^>]* href="[^"]*/([^/"#]+)#sha256=([0-9a-f]{64})"')


class MissingWheel(Exception):
    """No index has a wheel of the version for the platform."""


def files(index: str, name: str) -> list[tuple[str, str]]:
    """File names and SHA-256 of what an index has of a package, in JSON or HTML.

    Raises URLError if the index cannot be reached."""
    request = urllib.request.Request(f"{index.rstrip('/')}/{name}/", headers={"Accept": f"{JSON}, text/html;q=0.1"})
    context = ssl.create_default_context(cafile=os.environ.get("PIP_CERT") or None)
    try:
        with urllib.request.urlopen(request, timeout=60, context=context) as reply:
            body = reply.read().decode()
    except urllib.error.HTTPError as error:
        if error.code in (403, 404):
            return []
        raise
    if body.startswith("{"):
        listed = json.loads(body)["files"]
        return [(file["filename"], file["hashes"]["sha256"]) for file in listed if "sha256" in file["hashes"]]
    return [(unquote(unescape(file)), digest) for file, digest in LINK.findall(body)]


def fits(file: str, version: str) -> bool:
    """Whether the file is a wheel of the version, of any local build, for the platform."""
    try:
        _, found, _, tags = parse_wheel_filename(file)
    except (InvalidWheelFilename, InvalidVersion):
        return False
    expected = Version(version)
    same = found == expected or (expected.local is None and Version(found.public) == expected)
    return same and not TAGS.isdisjoint(tags)


def hashes(name: str, version: str, indexes: list[str], recorded: list[str]) -> list[str]:
    """The SHA-256 of each wheel that fits, sorted; also those recorded before, if an index cannot be reached."""
    found: set[str] = set()
    for index in indexes:
        try:
            listed = files(index, canonicalize_name(name))
        except urllib.error.URLError as error:
            print(f"{index} cannot be reached ({error.reason}): {name} keeps its hashes", file=sys.stderr)
            found.update(recorded)
            continue
        found.update(digest for file, digest in listed if fits(file, version))
    if not found:
        raise MissingWheel(f"no index has a wheel of {name}=={version} for CPython 3.11 on x86-64 Linux")
    return sorted(found)


def rewrite(text: str, indexes: list[str]) -> str:
    """The lock file with the hashes of its requirements; comments stay."""

    def replaced(match: re.Match[str]) -> str:
        name, version, recorded = match[1], match[2], HASH.findall(match[3])
        lines = [f"    --hash=sha256:{digest}" for digest in hashes(name, version, indexes, recorded)]
        return " \\\n".join([f"{name}=={version}", *lines])

    return REQUIREMENT.sub(replaced, text)


def main() -> None:
    """Rewrite each file in place."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--index", action="append", default=[], help="also ask this index")
    parser.add_argument("locks", nargs="+", type=Path)
    given = parser.parse_args()
    indexes = [os.environ.get("PIP_INDEX_URL") or PyPI.simple_url, *given.index]
    for lock in given.locks:
        try:
            lock.write_text(rewrite(lock.read_text(), indexes))
        except (MissingWheel, urllib.error.URLError) as error:
            raise SystemExit(f"{lock}: {error}") from error


if __name__ == "__main__":
    main()
