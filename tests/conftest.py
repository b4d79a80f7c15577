"""What several test folders share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.apiserver import ApiServer, api_server

settings.register_profile("plimsoll", deadline=None)  # a busy machine is no finding: no test is timed
settings.load_profile("plimsoll")


@pytest.fixture(scope="session")
def apiserver() -> Iterator[ApiServer]:
    """One API server for the whole run; tests use namespaces of their own."""
    with api_server() as server:
        yield server
