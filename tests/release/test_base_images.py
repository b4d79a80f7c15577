"""Base images: the file, and digests from a registry that speaks Docker's protocol on the loopback."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from release.base_images import FILE, BaseImageError, main, missing, parse, registry_digest, resolve
from tests.release.loopback import Handler, serving

INDEX = json.dumps({"mediaType": "application/vnd.oci.image.index.v1+json", "manifests": []}).encode()
SINGLE = json.dumps({"mediaType": "application/vnd.oci.image.manifest.v1+json"}).encode()
DIGEST = f"sha256:{hashlib.sha256(INDEX).hexdigest()}"
OLD = "sha256:" + "0" * 64


class Registry(Handler):
    """Gives manifests only for the token that it gives out, as Docker Hub does."""

    def do_GET(self) -> None:
        host = self.headers["Host"]
        if self.path.startswith("/token?"):
            right = self.path == "/token?service=here&scope=repository%3Ateam%2Fbase%3Apull"
            self.answer(b'{"token": "t1"}', 200 if right else 400)
        elif self.headers.get("Authorization") != "Bearer t1":
            scope = 'service="here",scope="repository:team/base:pull"'
            self.answer(b"{}", 401, **{"WWW-Authenticate": f'Bearer realm="http://{host}/token",{scope}'})
        else:
            body = {"/v2/team/base/manifests/1": INDEX, "/v2/team/base/manifests/amd64": SINGLE}.get(self.path)
            self.answer(body or b"{}", 404 if body is None else 200)


@pytest.fixture
def host() -> Iterator[str]:
    with serving(Registry) as address:
        yield address


def test_recorded_base_images_are_those_that_builds_use() -> None:
    images = {image.name: image for image in parse(FILE.read_text())}
    assert set(images) == {"DEBIAN", "VLLM", "ENVOY"}
    assert images["DEBIAN"].digest
    assert images["DEBIAN"].tag.startswith("bookworm-20")


@pytest.mark.parametrize("line", ["DEBIAN=debian", "debian:1", "A=b:1@sha256:12", "A=b@sha256:" + "0" * 64, "A = b:1"])
def test_parse_other_line_is_an_error_that_names_it(line: str) -> None:
    with pytest.raises(BaseImageError, match="is not NAME=REPOSITORY:TAG") as error:
        parse(f"# comment\n\n{line}\n")
    assert f"'{line}'" in str(error.value)


def test_missing_digest_is_said_with_the_remedy() -> None:
    [line] = missing(parse(f"A=b:1\nC=registry.example.com:5000/d:2@{OLD}"))
    assert line.startswith("base-images.env: A=b:1 has no digest. Run `make base-images`")


def test_resolve_writes_digests_and_keeps_comments(host: str) -> None:
    text = f"# why\nA={host}/team/base:1\nB={host}/team/base:1@{OLD}\n"
    assert resolve(text) == f"# why\nA={host}/team/base:1@{DIGEST}\nB={host}/team/base:1@{DIGEST}\n"


def test_registry_without_the_tag_is_named(host: str) -> None:
    with pytest.raises(BaseImageError, match=rf"{host} has no image {host}/team/base:2 \(status 404\)"):
        registry_digest(f"{host}/team/base", "2")


def test_image_of_one_platform_is_rejected(host: str) -> None:
    with pytest.raises(BaseImageError, match="is one platform's image"):
        registry_digest(f"{host}/team/base", "amd64")


def test_resolve_unreachable_registry_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "base-images.env"
    file.write_text("A=127.0.0.1:1/team/base:1\n")
    assert main(["resolve"], file) == 1
    assert "127.0.0.1:1 cannot be reached" in capsys.readouterr().out
    assert file.read_text() == "A=127.0.0.1:1/team/base:1\n"


@pytest.mark.parametrize(("digest", "status"), [("", 1), (f"@{OLD}", 0)])
def test_check_exit_status_says_if_digests_are_there(tmp_path: Path, digest: str, status: int) -> None:
    file = tmp_path / "base-images.env"
    file.write_text(f"A=b:1{digest}\n")
    assert main(["check"], file) == status


def test_other_words_are_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["update"]) == 2
    assert "usage:" in capsys.readouterr().err
