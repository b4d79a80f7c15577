"""A software bill of materials (CycloneDX 1.6, JSON) of a container image.

Problem: a lock file says what should be installed; it lacks Debian's packages and whatever a base image brings.
Idea: read the image's files, not its recipe. `docker export` streams them, and two kinds of records are enough: dpkg's
status file and the METADATA of each Python distribution. Nothing of the image is executed. The same files give the same
document, byte for byte.

    build/tools/bin/python -m release.sbom NAME IMAGE FILE
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tarfile
import uuid
from collections.abc import Iterator
from email.parser import HeaderParser
from pathlib import Path
from typing import IO, Any, Final
from urllib.parse import quote

_DPKG_STATUS: Final = "var/lib/dpkg/status"
_OS_RELEASE: Final = "usr/lib/os-release"
_METADATA: Final = re.compile(r"(?:^|/)[^/]+\.dist-info/METADATA$")
_BLOCK: Final = 1 << 20
_NAMESPACE: Final = uuid.UUID("5d1c8e0b-6f0a-4d0f-9a53-0d2f4f1f7f3e")


class SbomError(Exception):
    """The image cannot be read, or it has none of the records."""


def document(name: str, image: str, archive: IO[bytes]) -> dict[str, Any]:
    """The bill of materials of an image whose files `archive` is a tar of. Raises SbomError if it has no packages."""
    python: list[dict[str, Any]] = []
    dpkg = release = ""
    with tarfile.open(fileobj=archive, mode="r|") as tar:
        for member in tar:
            path = member.name.removeprefix("./")
            if not member.isfile() or not (path in (_DPKG_STATUS, _OS_RELEASE) or _METADATA.search(path)):
                continue
            file = tar.extractfile(member)
            text = file.read().decode(errors="replace") if file else ""
            if path == _DPKG_STATUS:
                dpkg = text
            elif path == _OS_RELEASE:
                release = text
            else:
                python.extend(_python_component(text))
    found = sorted([*python, *_debian_components(dpkg, release)], key=json.dumps)
    parts = {part["bom-ref"]: part for part in found}
    if not parts:
        raise SbomError(f"{image} has neither Debian packages nor Python distributions")
    components = [parts[reference] for reference in sorted(parts)]
    identity = uuid.uuid5(_NAMESPACE, json.dumps([name, image, components], sort_keys=True))
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{identity}",
        "version": 1,
        "metadata": {"component": {"type": "container", "bom-ref": "image", "name": name, "version": image}},
        "components": components,
    }


def _python_component(metadata: str) -> Iterator[dict[str, Any]]:
    headers = HeaderParser().parsestr(metadata)
    name, version = headers["Name"], headers["Version"]
    if not name or not version:
        return
    normalized = re.sub(r"[-_.]+", "-", name).lower()
    part = _component(name, version, f"pkg:pypi/{normalized}@{quote(version, safe='')}")
    if expression := headers["License-Expression"]:
        part["licenses"] = [{"expression": expression}]
    yield part


def _debian_components(status: str, release: str) -> Iterator[dict[str, Any]]:
    """Installed packages only; a removed one leaves its configuration in the file."""
    system = dict(re.findall(r'^(ID|VERSION_ID)="?([^"\n]+)"?$', release, re.MULTILINE))
    distribution = system.get("ID", "debian")
    for paragraph in re.split(r"\n{2,}", status):
        fields = dict(re.findall(r"^(Package|Status|Version|Architecture): (.+)$", paragraph, re.MULTILINE))
        if fields.get("Status", "").endswith(" installed"):
            name, version = fields["Package"], fields["Version"]
            qualifiers = (
                f"arch={fields.get('Architecture', 'all')}&distro={distribution}-{system.get('VERSION_ID', '')}"
            )
            purl = f"pkg:deb/{distribution}/{quote(name, safe='')}@{quote(version, safe='')}?{qualifiers.rstrip('-')}"
            yield _component(name, version, purl)


def _component(name: str, version: str, purl: str) -> dict[str, Any]:
    return {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}


def of_image(name: str, image: str) -> dict[str, Any]:
    """The bill of materials of an image that Docker has or can pull. Raises SbomError."""
    created = subprocess.run(["docker", "create", image, "none"], capture_output=True, text=True, check=False)
    if created.returncode:
        raise SbomError(f"Docker has no image {image}: {created.stderr.strip()}")
    container = created.stdout.split()[-1]
    try:
        with subprocess.Popen(["docker", "export", container], stdout=subprocess.PIPE) as export:
            assert export.stdout is not None
            made = document(name, image, export.stdout)
            while export.stdout.read(_BLOCK):
                pass  # what follows the archive's end mark; a closed pipe would fail the export
        if export.returncode:
            raise SbomError(f"{image}: docker export failed ({export.returncode})")
        return made
    except tarfile.TarError as error:
        raise SbomError(f"{image}: docker export gave no archive ({error})") from error
    finally:
        subprocess.run(["docker", "rm", container], capture_output=True, check=False)


def validate(text: str) -> None:
    """Raises SbomError where the document breaks the schema of CycloneDX."""
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    if error := JsonStrictValidator(SchemaVersion.V1_6).validate_str(text):
        raise SbomError(f"the document breaks CycloneDX's schema: {error}")


def main(words: list[str]) -> int:
    """The exit status: 1 if there is no bill of materials."""
    parser = argparse.ArgumentParser(prog="release.sbom", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", help="the component's name, such as operator")
    parser.add_argument("image", help="the image, as `docker create` takes it")
    parser.add_argument("file", type=Path, help="where to write")
    given = parser.parse_args(words)
    try:
        made = of_image(given.name, given.image)
        text = json.dumps(made, indent=1) + "\n"
        validate(text)
    except SbomError as error:
        print(error, file=sys.stderr)
        return 1
    given.file.write_text(text)
    print(f"{given.file}: {len(made['components'])} components")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
