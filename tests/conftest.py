"""What several test folders share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.apiserver import ApiServer, api_server

# A busy machine is no finding: no test is timed. CI judges a change, so it draws the same examples for the same code;
# runs by hand go on searching.
settings.register_profile("plimsoll", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("plimsoll")


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Bytes are no name: an archive has the time of its making in it, and parallel workers must collect equal names."""
    return argname if isinstance(val, bytes) else None


@pytest.fixture(scope="session")
def apiserver() -> Iterator[ApiServer]:
    """One API server for the whole run; tests use namespaces of their own."""
    with api_server() as server:
        yield server


@pytest.fixture(scope="session")
def cluster(apiserver: ApiServer) -> ApiServer:
    """The API server with our CRDs."""
    apiserver.install_crds()
    return apiserver
