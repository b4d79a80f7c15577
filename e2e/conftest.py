"""Fixtures of the cluster scenarios.

Engines take half a minute to start, so two services are shared by all scenarios that leave them as they found them:
`pd` (one prefill and two decode replicas, with a tool parser) and `solo` (one aggregated replica, without one). The
prober runs beside everything.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Generator, Iterator

import pytest

from e2e.cluster.settings import KUBECONFIG, WORKERS
from e2e.lib import stack
from e2e.lib.failure_report import describe
from e2e.lib.kube import Cluster
from e2e.lib.metrics import GatewayClient
from e2e.lib.prober import Prober
from e2e.lib.service import Service, make_manifest
from e2e.lib.tool_calls import TOOL_ARGS

SHARED = "e2e-shared"
TIMEOUT_S = 480
EXTENDED_TIMEOUT_S = 900
PD_MANIFEST = make_manifest(
    "pd", {"prefill": {}, "decode": {"minReplicas": 2, "maxReplicas": 2}}, engine={"args": list(TOOL_ARGS)}
)
SOLO_MANIFEST = make_manifest("solo", {"serve": {}})

# What leaves the operator and the shared services alone comes before test_quiet, whose quiet time it is. What
# changes or breaks things follows; then what removes everything, and what reads the audit log of the whole run.
FIRST_SCENARIOS = (
    "manifests",
    "first_response",
    "prefill_decode",
    "model_name_conflict",
    "condition_messages",
    "gated_model",
    "clients",
    "apis",
    "engine_simulator",
    "scaling",
    "independent_tiers",
    "drain",
    "idle_api_writes",
)
LAST_SCENARIOS = (
    "monitoring",
    "drift",
    "prefill_deleted",
    "engine_killed",
    "engine_hangs",
    "rolling_update",
    "picker_failure",
    "gateway_deleted",
    "admission",
    "disturbances",
)
LAST_SCENARIOS += (
    "lagging_signals",
    "model_mismatch",
    "eviction",
    "multiple_gateways",
    "gateway_scaling",
    "api_keys",
    "other_autoscalers",
    "operator_restarts",
    "webhook",
    "engine_rollout",
    "upgrade",
    "uninstall",
    "foreign_fleets",
    "rbac_use",
)

# Only `make e2e-all` runs these.
EXTENDED_SCENARIOS = (
    "adopt",
    "api_keys",
    "delivery",
    "drift",
    "engine_rollout",
    "eviction",
    "foreign_fleets",
    "gateway_scaling",
    "inference_pools",
    "internal_tls",
    "lagging_signals",
    "lora",
    "many_adapters",
    "model_mismatch",
    "names_change",
    "other_autoscalers",
    "other_engine",
    "prefill_policy",
    "prefix_routing",
    "request_limits",
    "second_release",
    "tls",
    "two_nodes",
    "webhook",
)

# Only `make e2e-keda` runs these: KEDA and the Prometheus adapter take minutes to build.
KEDA_SCENARIOS = ("keda", "hpa")

# Only `make e2e-flux` runs these: Flux's controllers take minutes to build.
FLUX_SCENARIOS = ("flux",)

# Only `make e2e-policies` runs these: the controller takes minutes to build.
POLICY_SCENARIOS = ("network_policies",)

# Only `make e2e-nodes` runs these: they need several nodes.
NODE_SCENARIOS = ("node_lost",)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--quiet-seconds", type=float, default=300.0, help="how long a converged fleet must make no API write"
    )
    parser.addoption("--keep", action="store_true", help="leave services, namespaces and the chart in place at the end")
    parser.addoption("--no-setup", action="store_true", help="the chart is installed as it should be")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        scenario = item.path.stem.removeprefix("test_")
        item.add_marker(getattr(pytest.mark, _suite(scenario)))
        if scenario in EXTENDED_SCENARIOS:
            item.add_marker(pytest.mark.extended)
        is_short = _suite(scenario) == "cluster" and item.get_closest_marker("extended") is None
        item.add_marker(pytest.mark.timeout(TIMEOUT_S if is_short else EXTENDED_TIMEOUT_S))
    items.sort(key=_order)


def _suite(scenario: str) -> str:
    """The marker by which a make target selects a scenario."""
    if scenario in NODE_SCENARIOS:
        return "nodes"
    if scenario in FLUX_SCENARIOS:
        return "flux"
    if scenario in POLICY_SCENARIOS:
        return "policies"
    return "keda" if scenario in KEDA_SCENARIOS else "cluster"


def _order(item: pytest.Item) -> int:
    names = [*FIRST_SCENARIOS, *LAST_SCENARIOS]
    return next((n for n, name in enumerate(names) if item.path.stem.startswith(f"test_{name}")), len(FIRST_SCENARIOS))


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """The local cluster with the chart installed; `make e2e` has made it and the images."""
    if not KUBECONFIG.exists():
        pytest.exit(f"there is no cluster: run make {'e2e-nodes' if WORKERS else 'e2e'}", returncode=2)
    with stack.connect_cluster() as access:
        if not request.config.getoption("--no-setup"):
            stack.install(access)
        yield access


@pytest.fixture(scope="session")
def gateway(cluster: Cluster) -> GatewayClient:
    return GatewayClient(cluster, stack.SYSTEM)


@pytest.fixture(scope="session")
def prober() -> Iterator[Prober]:
    with Prober() as running:
        yield running


@pytest.fixture(scope="session")
def shared(cluster: Cluster, prober: Prober, request: pytest.FixtureRequest) -> Iterator[dict[str, Service]]:
    """The shared services, Ready and probed."""
    stack.make_namespace(cluster, SHARED)
    start = time.monotonic()
    cluster.apply(PD_MANIFEST, SOLO_MANIFEST, namespace=SHARED)
    services = {name: Service(cluster, SHARED, name, stack.GATEWAY_URL) for name in ("pd", "solo")}
    for service in services.values():
        service.wait_ready()
    print(f"shared services Ready after {time.monotonic() - start:.0f} s")
    for service in services.values():
        prober.watch(service.key, service.target, service.get)
    yield services
    for service in services.values():
        prober.unwatch(service.key)
    if not request.config.getoption("--keep"):
        stack.drop_namespace(cluster, SHARED)


@pytest.fixture
def pd(shared: dict[str, Service]) -> Service:
    """One prefill and two decode replicas."""
    shared["pd"].wait_ready()
    return shared["pd"]


@pytest.fixture
def solo(shared: dict[str, Service]) -> Service:
    """One aggregated replica."""
    shared["solo"].wait_ready()
    return shared["solo"]


@pytest.fixture(scope="module")
def namespace(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[str]:
    """A namespace of the module's own, gone with it."""
    name = re.sub(r"[^a-z0-9]+", "-", request.path.stem.removeprefix("test_"))
    name = f"e2e-{name.strip('-')}"
    stack.make_namespace(cluster, name)
    yield name
    if not request.config.getoption("--keep"):
        stack.drop_namespace(cluster, name)


@pytest.fixture
def service(cluster: Cluster, namespace: str) -> Callable[[str], Service]:
    """A handle on a service of the module's namespace."""
    return lambda name: Service(cluster, namespace, name, stack.GATEWAY_URL)


@pytest.fixture(autouse=True)
def ready_invariant(prober: Prober) -> Iterator[None]:
    """Beside every scenario: no probe failed while Ready had been true for two seconds."""
    start = time.time()
    yield
    if prober.probes(start):
        print(prober.summary(start))
    violations = prober.ready_violations(start)
    assert not violations, "probes failed while Ready:\n" + "\n".join(p.record.line(start) for p in violations)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A scenario that held shows what it saw; one that did not, the state of the cluster too."""
    report = yield
    fixtures = getattr(item, "funcargs", {})
    if report.failed and "cluster" in fixtures:
        namespaces = {SHARED, fixtures.get("namespace", SHARED)}
        report.sections.append(("the cluster", describe(fixtures["cluster"], sorted(namespaces), stack.SYSTEM)))
    terminal = item.config.pluginmanager.getplugin("terminalreporter")
    if report.failed:  # at once: a run that is ended from outside prints no summary
        terminal.write_line(f"\n{item.name} failed in {report.when}: {str(call.excinfo and call.excinfo.value)[:2000]}")
    if report.when == "call" and report.passed and report.capstdout:
        terminal.write_line(
            f"\n{item.name} ({report.duration:.0f} s)\n  " + report.capstdout.strip().replace("\n", "\n  ")
        )
    return report
