"""Downloads with networks in NO_PROXY."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from launcher.no_proxy import without_networks

MIRROR = {"HF_ENDPOINT": "http://10.1.2.3:8080"}


@pytest.mark.parametrize(
    ("no_proxy", "more", "expected"),
    [
        ("10.0.0.0/8,fd00::/8, .svc,localhost", {}, ".svc,localhost"),
        ("10.0.0.0/8,.svc", MIRROR, ".svc,10.1.2.3"),
        ("192.168.0.0/16", MIRROR, ""),
        ("10.1.2.3/8", MIRROR, "10.1.2.3"),  # host bits are set
        ("fd00::/8", {"HF_ENDPOINT": "http://[fd00::5]:8080"}, "fd00::5"),
        ("fd00::/8", {"HF_ENDPOINT": "http://hub.svc"}, ""),
        ("fd00::/8", {"HF_ENDPOINT": "http://[broken"}, ""),
        ("10.0.0.0/8", {"AWS_ENDPOINT_URL": "http://10.0.0.5:9000"}, "10.0.0.5"),
        ("169.254.0.0/16", {"AWS_CONTAINER_CREDENTIALS_FULL_URI": "http://169.254.170.23/v1"}, "169.254.170.23"),
        ("a/b,10.0.0.0/8", {}, "a/b"),
    ],
)
def test_networks_are_replaced_by_the_endpoint_in_them(no_proxy: str, more: dict[str, str], expected: str) -> None:
    assert without_networks({"NO_PROXY": no_proxy, "no_proxy": no_proxy, **more}) == {
        "NO_PROXY": expected,
        "no_proxy": expected,
    }


@pytest.mark.parametrize("environment", [{}, {"NO_PROXY": ""}, {"NO_PROXY": "localhost,::1,.svc"}])
def test_variables_without_networks_stay(environment: dict[str, str]) -> None:
    assert without_networks(environment) == {}


def test_http_client_accepts_what_is_left() -> None:
    """The client of huggingface_hub, in a process that has a proxy."""
    before = {"HTTPS_PROXY": "http://proxy:3128", "NO_PROXY": "10.0.0.0/8,fd00::/8,::1,.svc"}

    def start(environment: dict[str, str]) -> int:
        own = {key: text for key, text in os.environ.items() if not key.lower().endswith("_proxy")}
        made = subprocess.run(
            [sys.executable, "-c", "import httpx; httpx.Client()"], env={**own, **environment}, capture_output=True
        )
        return made.returncode

    assert start(before) != 0, "the client reads networks now: this module is not needed any more"
    assert start({**before, **without_networks(before)}) == 0
