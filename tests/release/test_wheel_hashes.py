"""Hashes of pinned wheels, from package indexes on the loopback."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from release.wheel_hashes import MissingWheel, fits, rewrite
from tests.release.loopback import Handler, serving

A, B, C = ("a" * 64, "b" * 64, "c" * 64)
FILES = {
    "torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl": A,
    "torch-2.13.0-cp312-cp312-manylinux_2_28_x86_64.whl": C,
    "torch-2.12.0-cp311-cp311-manylinux_2_28_x86_64.whl": C,
    "torch-2.13.0.tar.gz": C,
}


class Index(Handler):
    """/json is PyPI's form, /html that of torch's own index."""

    def do_GET(self) -> None:
        pages = {
            "/json/torch/": json.dumps(
                {"files": [{"filename": name, "hashes": {"sha256": digest}} for name, digest in FILES.items()]}
            ),
            "/html/torch/": '<a href="/whl/torch-2.13.0%2Bcpu-cp311-cp311-manylinux_2_28_x86_64.whl#sha256='
            + B
            + '">torch</a>',
        }
        body = pages.get(self.path, "").encode()
        self.answer(body, 200 if body else 404)


@pytest.fixture
def address() -> Iterator[str]:
    with serving(Index) as host:
        yield f"http://{host}"


def lock(*digests: str) -> str:
    return "# why\n" + " \\\n".join(["torch==2.13.0", *(f"    --hash=sha256:{digest}" for digest in digests)]) + "\n"


def test_rewrite_takes_the_wheels_of_both_indexes(address: str) -> None:
    assert rewrite(lock(C), [f"{address}/json", f"{address}/html/"]) == lock(A, B)


def test_rewrite_unreachable_index_keeps_recorded_hashes(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert rewrite(lock(A, B), [f"{address}/json", "http://127.0.0.1:1"]) == lock(A, B)
    assert "http://127.0.0.1:1 cannot be reached" in capsys.readouterr().err


def test_rewrite_package_without_wheel_is_named(address: str) -> None:
    with pytest.raises(MissingWheel, match="no index has a wheel of other==1 for"):
        rewrite("other==1\n", [f"{address}/json"])


@pytest.mark.parametrize(
    ("file", "version", "expected"),
    [
        ("a-1.0-py3-none-any.whl", "1.0", True),
        ("a-1.0-cp38-abi3-manylinux_2_17_x86_64.manylinux2014_x86_64.whl", "1.0", True),
        ("a-1.0+cpu-py3-none-any.whl", "1.0", True),
        ("a-1.0-py3-none-any.whl", "1.0+cpu", False),
        ("a-1.0-cp311-cp311-manylinux_2_28_aarch64.whl", "1.0", False),
        ("a-1.0-cp311-cp311-musllinux_1_2_x86_64.whl", "1.0", False),
        ("a-0.18-py36+-none-any.whl", "0.18", False),
    ],
)
def test_fits_only_wheels_of_version_and_platform(file: str, version: str, expected: bool) -> None:
    assert fits(file, version) is expected
