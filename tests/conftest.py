"""What several test folders share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.apiserver import ApiServer, api_server


@pytest.fixture(scope="session")
def apiserver() -> Iterator[ApiServer]:
    """One API server for the whole run; tests use namespaces of their own."""
    with api_server() as server:
        yield server
