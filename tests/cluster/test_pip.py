"""pip's settings reach a build, and a folder of wheels does as an address."""

from __future__ import annotations

import urllib.request
from pathlib import Path

import pytest

from e2e.cluster import pip_settings


def test_pip_settings_pass_urls_but_not_paths() -> None:
    environment = {"PIP_INDEX_URL": "http://index/simple", "PIP_CERT": "/etc/ssl/here.crt", "PIP_TRUSTED_HOST": ""}
    with pip_settings.settings(environment) as args:
        assert args == {"PIP_INDEX_URL": "http://index/simple"}


def test_pip_settings_keep_debian_certificate_bundle() -> None:
    environment = {"PIP_CERT": "/etc/ssl/certs/ca-certificates.crt"}
    with pip_settings.settings(environment) as args:
        assert args == environment


def test_pip_settings_find_links_url_is_kept() -> None:
    with pip_settings.settings({"PIP_FIND_LINKS": "http://wheels/"}) as args:
        assert args == {"PIP_FIND_LINKS": "http://wheels/"}


@pytest.mark.parametrize("prefix", ["", "file://"])
def test_pip_settings_wheel_folder_is_served(tmp_path: Path, prefix: str) -> None:
    (tmp_path / "torch-1-py3-none-any.whl").write_text("wheel")
    environment = {"PIP_FIND_LINKS": f"{prefix}{tmp_path}"}
    with pip_settings.settings(environment) as args, urllib.request.urlopen(args["PIP_FIND_LINKS"]) as reply:
        assert b"torch-1-py3-none-any.whl" in reply.read()


@pytest.mark.parametrize("folder", ["", "missing"])
def test_pip_settings_folder_without_wheels_is_omitted(tmp_path: Path, folder: str) -> None:
    with pip_settings.settings({"PIP_FIND_LINKS": str(tmp_path / folder)}) as args:
        assert args == {}
