"""The images that ours and the chart build on, each by tag and digest, in one file.

Problem: a tag names another image next month, so two builds of one commit differ, and nobody sees the change.
Idea: `base-images.env` names each image by digest, builds take it as build arguments, and a change of it is a commit.
`resolve` asks the registries which digests the tags have now; `check` fails where a digest is missing.

    python3 -m release.base_images {check|resolve}

Only the standard library is needed: a release checks before it installs anything.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

FILE: Final = Path(__file__).with_name("base-images.env")
_LINE: Final = re.compile(r"^([A-Z]+)=([^:@\s]+(?::\d+/[^:@\s]+)?):([\w.-]+)(?:@(sha256:[0-9a-f]{64}))?$")
_INDEXES: Final = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
_TIMEOUT_S: Final = 30.0


class BaseImageError(Exception):
    """The file has a line that names no image, or a registry does not say what a tag is."""


@dataclass(frozen=True)
class BaseImage:
    """`digest` is empty until a registry was asked."""

    name: str
    repository: str
    tag: str
    digest: str = ""

    @property
    def reference(self) -> str:
        """What a Dockerfile's FROM or a pod takes."""
        return f"{self.repository}:{self.tag}" + (f"@{self.digest}" if self.digest else "")


def parse(text: str) -> list[BaseImage]:
    """The images of a file; raises BaseImageError for a line that is neither one nor a comment."""
    found = []
    for line in text.splitlines():
        if line and not line.startswith("#"):
            match = _LINE.match(line)
            if match is None:
                raise BaseImageError(
                    f"{FILE.name}: '{line}' is not NAME=REPOSITORY:TAG or NAME=REPOSITORY:TAG@sha256:DIGEST"
                )
            found.append(BaseImage(match[1], match[2], match[3], match[4] or ""))
    return found


def load() -> dict[str, str]:
    """The reference of each image by its name, which is also the name of the build argument."""
    return {image.name: image.reference for image in parse(FILE.read_text())}


def missing(images: list[BaseImage]) -> list[str]:
    """One sentence for each image without a digest."""
    return [
        f"{FILE.name}: {image.name}={image.reference} has no digest. Run `make base-images` where its registry can be "
        "reached, and commit the file."
        for image in images
        if not image.digest
    ]


def resolve(text: str) -> str:
    """The file with the digests that the tags have now; comments stay. Raises BaseImageError."""
    for image in parse(text):
        digest = registry_digest(image.repository, image.tag)
        text = text.replace(f"{image.name}={image.reference}", f"{image.name}={image.repository}:{image.tag}@{digest}")
    return text


def registry_digest(repository: str, tag: str) -> str:
    """The SHA-256 of the index of platforms that a registry has under a tag. Raises BaseImageError."""
    host, path = _host(repository)
    scheme = "http" if host.split(":")[0] in ("localhost", "127.0.0.1") else "https"
    url = f"{scheme}://{host}/v2/{path}/manifests/{tag}"
    try:
        body = _get(url, "")
    except urllib.error.HTTPError as error:
        raise BaseImageError(f"{host} has no image {repository}:{tag} (status {error.code})") from error
    except urllib.error.URLError as error:
        raise BaseImageError(f"{host} cannot be reached ({error.reason}); no digest was changed") from error
    if json.loads(body).get("mediaType") not in _INDEXES:
        raise BaseImageError(f"{repository}:{tag} is one platform's image; name a tag with an index of platforms")
    return f"sha256:{hashlib.sha256(body).hexdigest()}"


def _host(repository: str) -> tuple[str, str]:
    """The registry's host and the path there, by Docker's rules: a first part without dot and port is no host."""
    first, _, rest = repository.partition("/")
    if rest and ("." in first or ":" in first or first == "localhost"):
        return first, rest
    return "registry-1.docker.io", repository if rest else f"library/{repository}"


def _get(url: str, token: str) -> bytes:
    """A manifest; where the registry asks for a token, with the anonymous one that its issuer gives."""
    headers = {"Accept": ", ".join(_INDEXES)} | ({"Authorization": f"Bearer {token}"} if token else {})
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=_TIMEOUT_S) as reply:
            body: bytes = reply.read()
            return body
    except urllib.error.HTTPError as error:
        challenge = error.headers.get("WWW-Authenticate", "")
        if error.code != 401 or token or not challenge.startswith("Bearer "):
            raise
        return _get(url, _anonymous_token(challenge))


def _anonymous_token(challenge: str) -> str:
    fields = dict(re.findall(r'(\w+)="([^"]*)"', challenge))
    query = urllib.parse.urlencode({key: fields[key] for key in ("service", "scope") if key in fields})
    with urllib.request.urlopen(f"{fields['realm']}?{query}", timeout=_TIMEOUT_S) as reply:
        answer: dict[str, Any] = json.load(reply)
    return str(answer.get("token") or answer.get("access_token") or "")


def main(words: list[str], file: Path = FILE) -> int:
    """The exit status: 1 where a digest is missing or cannot be had, 2 for other words."""
    if words not in (["check"], ["resolve"]):
        print("usage: python3 -m release.base_images {check|resolve}", file=sys.stderr)
        return 2
    try:
        if words == ["resolve"]:
            file.write_text(resolve(file.read_text()))
        lines = missing(parse(file.read_text()))
    except BaseImageError as error:
        lines = [str(error)]
    print("\n".join(lines or [image.reference for image in parse(file.read_text())]))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
