"""What several test folders share."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.apiserver import ApiServer, api_server

# A busy machine is no finding: no test is timed. CI judges a change, so it draws the same examples for the same code;
# runs by hand go on searching.
settings.register_profile("plimsoll", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("plimsoll")


# A file runs in one process. Were one of these the last to start, the other processes would wait for it: they take ten
# seconds or more, the first of them minutes. Files that mostly wait alternate with those that compute.
LONG_FILES = (
    "controllers/test_api_faults.py",
    "core/test_admission_kv.py",
    "core/test_autoscaler.py",
    "gateway/test_envoy_shutdown.py",
    "core/test_autoscaler_fleet.py",
    "docs/test_shell.py",
    "engine_image/simulated/test_hung_engine.py",
    "bench/test_scoreboard.py",
    "docs/test_backup.py",
    "gateway/test_envoy_one_queue.py",
    "sim/test_plan_simulation.py",
    "controllers/test_webhook_api.py",
    "core/test_rejection_feedback.py",
    "gateway/test_envoy_failures.py",
    "sim/test_other_engines.py",
    "gateway/test_envoy_scale.py",
    "controllers/test_reconciler.py",
    "core/test_kv_capacity.py",
    "gateway/test_envoy_sdks.py",
    "controllers/test_memory_growth.py",
    "gateway/test_endpoint_picker_lifecycle.py",
    "controllers/test_limit_status.py",
    "controllers/test_engine_rollout_api.py",
    "core/test_noise_model.py",
    "engine_image/simulated/test_process.py",
    "core/test_admission_hostile_clients.py",
    "engine_image/test_tls.py",
    "core/test_silent_gateways.py",
    "gateway/test_envoy_tls.py",
    "test_docstrings.py",
)
FOLDER = Path(__file__).parent


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Modules and tests stay to the end, so no garbage collection looks at them: not while they are made, nor later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files come first, in the order of LONG_FILES, and then those with the most tests."""
    ranks = {FOLDER / name: rank for rank, name in enumerate(LONG_FILES)}
    counts = Counter(item.path for item in items)
    items.sort(key=lambda item: (ranks.get(item.path, len(ranks)), -counts[item.path], str(item.path)))


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
