"""Several gateways are one queue: all slots of a replica are used, quotas are exact, an owner that goes costs nothing.

The operator's figures match those of the clients of all. An overload is cut to what can be carried, also when the owner
dies. A gateway that decides without the owner says so in its metrics: a bound allows for these requests and no others.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest

from e2e.lib import simulated_fleet, stack
from e2e.lib.client import Prompt
from e2e.lib.kube import Cluster, Object
from e2e.lib.load import Arrival, ClosedLoop, Load, OpenLoop, poisson
from e2e.lib.metrics import GatewayClient
from e2e.lib.node import signal_container
from e2e.lib.operator import SLOT_S, OperatorClient, gateways_read_at, last_minute_bounds, metric_value, observed_at
from e2e.lib.prober import Prober
from e2e.lib.request_log import RequestRecord, RequestResult, nearest_rank
from e2e.lib.service import Service
from e2e.lib.wait import sleep, wait_until
from plimsoll.core.admission.replica import STEP_TIME_RATIO_RANGE

GATEWAYS = (2, pytest.param(3, marks=pytest.mark.extended))
SLOTS = 9  # sequences of the replica: few, so that a share of them is much less than all
LIGHT, OVERLOAD = 2.0, 11.0  # requests/s; the replica carries about 4
AT_CAPACITY, AT_CAPACITY_S = 0.9, 60.0  # of what the replica carries within the SLO
QUOTA, QUOTA_PER_S, QUOTA_REQUESTS = 5, 0.5, 24  # a burst of ten seconds of the rate
TENANT = "jobs"
TENANT_HEADER = (("x-gateway-inference-fairness-id", TENANT),)
CLOSE = (("connection", "close"),)  # each request on a connection of its own, so that every gateway gets some
USERS, NEW_USERS = 2, 2  # on connections that they keep, and on new ones
AFTER_REQUESTS = 60  # since an owner was deleted
GONE_S = 180.0  # of a deleted pod: its last stream, and idle connections
LIGHT_S = 36.0  # all of it within the operator's last minute when it is compared
RETRY_HEADER = (("x-stainless-retry-count", "1"),)  # what SDKs send with a second attempt
RETRY_EVERY, RETRY_OFFSET = 5, 4  # of five requests one is sent again that came four before
FIRST, SECOND = "first", "second of"  # labels of these, with a number
SETTLED_S = 20.0  # after a step in load: the gates have learned what comes
KILLED_S, SAMPLED_S, SAMPLES = 22.0, 25.0, 10
DOCUMENT_PRECISION = 1e-5  # `explain` tells its figures to six digits
ENDPOINT_REMOVAL_S = 5.0  # until the node no longer sends connections to an endpoint that was removed


@pytest.fixture(scope="module", params=GATEWAYS, ids="{}-gateways".format)
def gateways(request: pytest.FixtureRequest, cluster: Cluster, gateway: GatewayClient) -> Iterator[int]:
    """The number of gateways that can ask each other; afterwards there are as many as before."""
    before, count = len(stack.gateway_pods(cluster)), int(request.param)
    stack.scale_gateways(cluster, count)
    wait_until("each gateway can ask the others", gateway.has_all_peers, 60)
    yield count
    stack.scale_gateways(cluster, before)


@pytest.fixture(scope="module")
def operator(cluster: Cluster) -> OperatorClient:
    return OperatorClient(cluster, stack.SYSTEM)


@dataclass(frozen=True)
class LearnedService:
    """A service that has had one load since it was made.

    reported: what the operator knew meanwhile and in the end. fallbacks: requests decided without the owner.
    """

    service: Service
    records: list[RequestRecord]
    reported: list[Object]
    fallbacks: int


@pytest.fixture(scope="module")
def learned_service(
    cluster: Cluster, namespace: str, operator: OperatorClient, gateway: GatewayClient, gateways: int
) -> Iterator[LearnedService]:
    """One replica behind all gateways, which know what it carries."""
    name = f"behind-{gateways}"
    made = simulated_fleet.fleet_manifest(name, {"serve": simulated_fleet.replica_bounds(1, 1)}, max_num_seqs=SLOTS)
    made["spec"]["admission"] = {"tenants": [{"name": TENANT, "requestsPerSecond": str(QUOTA_PER_S)}]}
    cluster.apply(made, namespace=namespace)
    found = Service(cluster, namespace, name, stack.GATEWAY_URL)
    found.wait_ready()
    wait_until("all that gateways and engines tell is heard", lambda: _has_full_coverage(operator, found))
    fallbacks = gateway.fallbacks()
    with Load(found.target, poisson(LIGHT, LIGHT_S, _mixed_prompts, seed=1)) as load:
        reported = _collect_documents(operator, found, LIGHT_S)
        load.wait()
        reported.append(wait_until("the operator has heard the end of it", lambda: _final_metrics(operator, found), 20))
    fallbacks = gateway.fallbacks() - fallbacks
    simulated_fleet.wait_limits_published(found)
    yield LearnedService(found, load.ledger.records, reported, fallbacks)
    cluster.kubectl("delete", "plim", name, "-n", namespace)


@pytest.fixture(scope="module")
def gate(learned_service: LearnedService) -> Service:
    return learned_service.service


def _mixed_prompts(n: int) -> Prompt:
    """Short and long ones, some of which say that they are second attempts, and are not."""
    words, tokens = ((200, 24), (400, 72))[n % 2]
    return replace(
        simulated_fleet.prompts("mixed", words, tokens)(n), headers=CLOSE + (() if n % RETRY_EVERY else RETRY_HEADER)
    )


def _with_retries(rate: float, name: str, seed: int) -> OpenLoop:
    """Poisson arrivals, some of whom are second attempts of requests that came shortly before."""
    first = simulated_fleet.prompts(name, 300, 48)

    def prompt(n: int) -> Prompt:
        again = n >= RETRY_OFFSET and n % RETRY_EVERY == 0
        if again:
            labels = ((SECOND, str(n - RETRY_OFFSET)),)
            return replace(first(n - RETRY_OFFSET), headers=CLOSE + RETRY_HEADER, labels=labels)
        return replace(first(n), headers=CLOSE, labels=((FIRST, str(n)),))

    return poisson(rate, 300, prompt, seed)


def _has_full_coverage(operator: OperatorClient, service: Service) -> bool:
    """Whether there is a first reading of everybody, from which on all is counted."""
    document = operator.explain(service.key)["metrics"]
    parts = (document["gateways"], *document["tiers"].values()) if document else ()
    return bool(parts) and all(part["coverage"] == 1.0 for part in parts)


def _final_metrics(operator: OperatorClient, service: Service) -> Object | None:
    """What the operator knows once its engine has told that nothing runs any more."""
    document = operator.explain(service.key)
    nothing = metric_value(document, "in_flight") == 0.0 and document["metrics"]["tiers"]["serve"]["running"] == 0.0
    return document if nothing else None


def _collect_documents(operator: OperatorClient, service: Service, seconds: float) -> list[Object]:
    """What every tick of this time had heard."""
    reported: dict[str, Object] = {}
    end = time.time() + seconds
    while time.time() < end:
        document = operator.explain(service.key)
        reported[document["metrics"]["at"]] = document
        sleep(0.3)
    return list(reported.values())


def _first_attempts(records: list[RequestRecord]) -> list[RequestRecord]:
    return [r for r in records if SECOND not in dict(r.labels)]


def _batch(service: Service) -> int:
    """The sequences that a replica may have, as the operator publishes it."""
    return int(service.limits()["costModel"]["batch"])


def _owner_decides(gateway: GatewayClient, service: Service) -> Callable[[], bool]:
    return lambda: gateway.has_owner(service.key, _batch(service))


def _sample_slots(gateway: GatewayClient, service: Service, seconds: float) -> list[tuple[int, int, int]]:
    """Once a second: the whole, the slots of the owner, and what all gateways have at the replica."""
    observed = []
    for _ in range(round(seconds)):
        slots = gateway.slots(service.key)
        owned, running = slots[gateway.owner(service.key)], gateway.in_flight(service.key).total()
        observed.append((_batch(service), owned, running))
        sleep(1.0)
    return observed


def _admitted_within_slo(records: list[RequestRecord]) -> tuple[list[RequestRecord], int]:
    """Those that were let in, and how many of them had the promise."""
    admitted = [r for r in records if r.outcome is not RequestResult.REJECTED]
    return admitted, sum(map(simulated_fleet.within_slo, admitted))


def test_operator_metrics_match_client_records(learned_service: LearnedService, gateway: GatewayClient) -> None:
    """From the gateways' counts and the engine's page alone: arrivals, outcomes, lengths, latency, what runs."""
    records, last = learned_service.records, learned_service.reported[-1]
    sent, ok = len(records), [r for r in records if r.ok]
    reports = {
        found["gateway"]: found["services"][learned_service.service.key]["requests"] for found in gateway.signals()
    }
    counted, owner = list(reports.values()), gateway.owner(learned_service.service.key)
    elsewhere = sum(one["arrived"] for pod, one in reports.items() if pod != owner)
    total = {name: sum(one[name] for one in counted) for name in ("arrived", "retried", "succeeded", "failed")}
    refused = sum(sum(one["rejected"].values()) for one in counted)
    ticks = [
        (gateways_read_at(one), gateways_read_at(two), metric_value(two, "rate_per_s"))
        for one, two in pairwise(learned_service.reported)
    ]
    ticks = [tick for tick in ticks if tick[1] - tick[0] < 1.6]  # one right after the other: none was missed
    whole = sum(rate * (end - begin) for begin, end, rate in ticks)
    came = sum(begin < r.sent_at <= end for r in records for begin, end, _ in ticks)
    ttft_s = nearest_rank(sorted(r.ttft_s for r in ok if r.ttft_s is not None), 95)
    prompt, output = (sum(part) / len(ok) for part in zip(*map(_tokens, ok), strict=True))
    running = [_running(records, reported) for reported in learned_service.reported[:-1]]
    off = sum(abs(believed - there) for believed, there in running) / len(running)
    gateways, lengths = last["metrics"]["gateways"], last["metrics"]["requests"]
    print(f"{sent} sent, {len(ok)} ok; gateways {counted}, owner {owner}, {total}, {refused} refused")
    print(f"{learned_service.fallbacks} decided without the owner")
    print(f"operator: {gateways['arrivals']:.0f} in the last minute, {whole:.1f} of {came} by {len(ticks)} rates")
    print(f"TTFT p95 {gateways['ttft_s']} s, clients {ttft_s:.3f} s")
    print(f"lengths {lengths}, clients {prompt:.1f} and {output:.1f}")
    print(f"running by engine's word, and sent and not ended: {running}, off by {off:.2f} on average")
    assert not simulated_fleet.unexpected_failures(records), simulated_fleet.format_records(
        simulated_fleet.unexpected_failures(records)
    )
    arrived = total.pop("arrived")
    assert total == {"retried": 0, "succeeded": len(ok), "failed": 0}, "a header alone hides no demand"
    assert sent <= arrived <= sent + learned_service.fallbacks
    assert elsewhere <= learned_service.fallbacks, "arrivals are counted where they are decided: at the owner"
    assert refused == sent - len(ok)
    assert all(one["succeeded"] > 0 for one in counted), "one gateway carried it all"
    surely, at_most = last_minute_bounds(records, records, last)
    assert surely <= gateways["arrivals"] <= at_most + learned_service.fallbacks
    if surely == sent:  # on a slow machine the first ones may be more than a minute ago
        assert gateways["rejected_share"] == pytest.approx(refused / arrived, rel=DOCUMENT_PRECISION)
    assert came >= sent / 3, "too few ticks were seen one after the other"
    assert whole == pytest.approx(came, rel=0.1)
    assert gateways["ttft_s"] == pytest.approx(ttft_s, rel=0.25, abs=0.1)
    assert lengths["mean_prompt_tokens"] == pytest.approx(prompt, rel=0.05)
    assert lengths["output_tokens"] == pytest.approx(output, rel=0.05)
    assert off <= 2.0


def _tokens(record: RequestRecord) -> tuple[int, int]:
    return record.prompt_tokens, record.output_tokens


def _running(records: list[RequestRecord], reported: Object) -> tuple[float, int]:
    """Requests in the engine as the operator knew it, and as clients had sent and not seen ended, at that time."""
    tier = reported["metrics"]["tiers"]["serve"]
    at = observed_at(reported) - tier["age_s"]
    return tier["running"], sum(r.sent_at <= at <= r.ended_at for r in records)


def _pod(cluster: Cluster, name: str) -> Object:
    (found,) = [pod for pod in stack.gateway_pods(cluster) if pod["metadata"]["name"] == name]
    return found


def test_gateway_counter_reset_is_counted_once(
    learned_service: LearnedService, cluster: Cluster, gateway: GatewayClient, operator: OperatorClient, gateways: int
) -> None:
    """The owner's counts restart at 0 in the same pod: demand neither falls nor rises."""
    owner, counted = gateway.owner(learned_service.service.key), len(learned_service.records)
    allowed, fallbacks = gateway.failures_allowed(), gateway.fallbacks(without=owner)
    with Load(learned_service.service.target, poisson(LIGHT, 300, _mixed_prompts, seed=3)) as load:
        reported = _collect_documents(operator, learned_service.service, KILLED_S / 3)
        struck_at = time.time()
        signal_container(_pod(cluster, owner), "picker", "KILL")
        reported += _collect_documents(operator, learned_service.service, KILLED_S * 2 / 3)
        stack.wait_for_gateways(cluster, gateways)
        whole_at = time.time()
        reported += _collect_documents(operator, learned_service.service, 4.0)
    allowed, fallbacks = gateway.failures_allowed() - allowed, gateway.fallbacks(without=owner) - fallbacks
    learned_service.records.extend(load.ledger.records)
    records, last = learned_service.records, reported[-1]
    surely, at_most = last_minute_bounds(records, records, last)
    unseen = sum(struck_at - SLOT_S <= r.sent_at <= whole_at for r in records)
    rates = Counter(round(metric_value(one, "rate_per_s")) for one in reported)
    print(
        f"{load.ledger.summary()}; {allowed} passed unseen, whole after {whole_at - struck_at:.1f} s, {fallbacks} alone"
    )
    print(
        f"last minute {metric_value(last, 'arrivals'):.0f}, by clients {surely} to {at_most}; "
        f"rates {sorted(rates.items())}"
    )
    assert not simulated_fleet.unexpected_failures(records), simulated_fleet.format_records(
        simulated_fleet.unexpected_failures(records)
    )
    assert all(metric_value(one, "rate_per_s") >= 0.0 for one in reported)
    assert surely - unseen <= metric_value(last, "arrivals") <= at_most + fallbacks
    assert max(rates) <= counted / 3, "what was counted before was counted again"


def _counted(gateway: GatewayClient, service: Service) -> Counter[str]:
    """Arrivals, first attempts and others, over all gateways."""
    total: Counter[str] = Counter()
    for reported in gateway.services(service.key):
        total.update({name: reported["requests"][name] for name in ("arrived", "retried")})
    return total


@dataclass(frozen=True)
class ArrivalInterval:
    """Arrivals, as `_counted`, that were read between two times."""

    since: float
    counted: Counter[str]
    until: float


def _arrival_intervals(gateway: GatewayClient, service: Service, before: Counter[str]) -> list[ArrivalInterval]:
    """What has arrived since `before`, looked at again and again: at one time or another nothing is on its way."""
    return [ArrivalInterval(time.time(), _counted(gateway, service) - before, time.time()) for _ in range(SAMPLES)]


def test_slots_at_capacity_are_used_by_all_gateways(
    learned_service: LearnedService, gate: Service, gateway: GatewayClient, gateways: int
) -> None:
    """Near its capacity the replica keeps the SLO, with more requests at once than a share of its slots.

    Alone, each of two gateways would have 4 of the 9 slots, and would reject or delay what the other has room for.
    """
    wait_until("the owner has all slots", _owner_decides(gateway, gate), 60)
    batch, rate, fallbacks = _batch(gate), AT_CAPACITY * simulated_fleet.replica_capacity(gate), gateway.fallbacks()
    before = {found["gateway"]: found["services"][gate.key]["requests"]["succeeded"] for found in gateway.signals()}
    with Load(gate.target, poisson(rate, AT_CAPACITY_S, _mixed_prompts, seed=4)) as load:
        observed = _sample_slots(gateway, gate, AT_CAPACITY_S / 2)
        load.wait()
    after = {found["gateway"]: found["services"][gate.key]["requests"]["succeeded"] for found in gateway.signals()}
    fallbacks, records = gateway.fallbacks() - fallbacks, load.ledger.records
    learned_service.records.extend(records)
    kept, most = sum(map(simulated_fleet.within_slo, records)), load.ledger.most_at_engines()
    print(f"{load.ledger.summary()}\n{rate:.2f} req/s, up to {most} at once; {kept} within the SLO; {fallbacks} alone")
    print(f"carried {before} before, {after} after; whole, slots of the owner, running: {observed}")
    assert not simulated_fleet.unexpected_failures(records), load.ledger.explain()
    assert batch == SLOTS
    assert all(after[pod] > before[pod] for pod in before), "one gateway carried it all"
    assert most > batch // gateways
    assert kept >= 0.95 * len(records), "what is rejected counts as missed"


@pytest.mark.extended
def test_overload_is_limited_also_when_the_owner_dies(
    learned_service: LearnedService,
    gate: Service,
    cluster: Cluster,
    gateway: GatewayClient,
    operator: OperatorClient,
    prober: Prober,
    gateways: int,
) -> None:
    """Under the owner, and under the next one when it dies: what the first carried is cut, and the next takes over."""
    wait_until("the owner has all slots", _owner_decides(gateway, gate), 60)
    before, fallbacks = _counted(gateway, gate), gateway.fallbacks()
    with Load(gate.target, _with_retries(OVERLOAD, "overload", seed=2)) as load:
        sleep(SETTLED_S)
        begin = time.time()
        observed = _sample_slots(gateway, gate, SAMPLED_S)
        document, looks = operator.explain(gate.key), _arrival_intervals(gateway, gate, before)
        counted, counted_at, fallbacks = looks[-1].counted, looks[-1].until, gateway.fallbacks() - fallbacks
        struck_at = time.time()
        gone = gateway.owner(gate.key)
        address = _pod(cluster, gone)["status"]["podIP"]
        cluster.kubectl("delete", "pod", gone, "-n", stack.SYSTEM, "--force", "--grace-period=0", "--wait=false")
        stack.wait_endpoint_removed(cluster, address)
        gone_by = time.time() + ENDPOINT_REMOVAL_S
        prober.allow_failures(struck_at, gone_by)
        stack.wait_for_gateways(cluster, gateways)
        wait_until("the next owner has all slots", _owner_decides(gateway, gate), 60)
        owned_s = time.time() - struck_at
        sleep(max(0.0, gone_by + SAMPLED_S - time.time()))
    records = load.ledger.records
    cut = [  # at the dead one
        r for r in simulated_fleet.unexpected_failures(records) if r.sent_at <= gone_by and r.ended_at >= struck_at
    ]
    rest = [r for r in records if r not in cut]
    lost = simulated_fleet.unexpected_failures(rest)
    calm = [r for r in rest if begin <= r.sent_at < struck_at]
    after = [r for r in rest if r.sent_at >= gone_by]
    print(f"{load.ledger.summary()}\nwhole, slots of the owner, running: {observed}; {fallbacks} decided without it")
    print(f"the owner {gone} gone: {len(cut)} cut, owned again after {owned_s:.0f} s: {gateway.slots(gate.key)}")
    for name, some in (("settled", calm), ("after", after)):
        admitted, kept = _admitted_within_slo(some)
        print(f"{name}: {len(some)} offered, {len(admitted)} let in, {kept} of these within the promise")
        assert 0 < len(admitted) < len(some), "that was no overload"
        assert kept >= 0.95 * len(admitted), name
    everything = [*learned_service.records, *records]
    surely, at_most = last_minute_bounds(_first_attempts(everything), everything, document)
    arrived = metric_value(document, "arrivals")
    sent = [r for r in records if r.sent_at < counted_at]
    print(f"last minute before that: {arrived:.0f} by the operator, {surely} to {at_most} by clients")
    refused = {dict(r.labels).get(FIRST) for r in sent if r.outcome is RequestResult.REJECTED}
    seconds = [dict(r.labels).get(SECOND) in refused for r in sent if r not in _first_attempts(sent)]
    print(f"until then {len(sent)} sent, {len(seconds)} again of which {sum(seconds)} were refused, {dict(counted)}")
    assert surely <= arrived <= at_most + fallbacks, "what is refused arrives, too"
    assert all(look.counted.total() >= sum(r.ended_at <= look.since for r in records) for look in looks), looks
    assert all(look.counted.total() <= sum(r.sent_at < look.until for r in records) + fallbacks for look in looks), (
        looks
    )
    assert counted["retried"] <= sum(seconds), "a header alone hides no demand"
    assert not lost, simulated_fleet.format_records(lost)
    assert any(owned == batch for batch, owned, _ in observed), "the owner has not taken up what was published"
    for (before, *_), (batch, owned, running), (after, *_) in zip(
        [observed[0], *observed], observed, [*observed[1:], observed[-1]], strict=False
    ):
        most = max(before, batch, after)  # what is published may change between the status and a gateway's word
        assert owned <= most
        assert running <= most / STEP_TIME_RATIO_RANGE[0], (
            "a replica faster than the model holds more, but not the whole twice"
        )


def test_owner_deleted_under_load_costs_no_request(
    gate: Service, cluster: Cluster, gateway: GatewayClient, gateways: int
) -> None:
    """It serves until it may go. Meanwhile the next owner learns from all gateways what runs."""
    wait_until("the owner has all slots", _owner_decides(gateway, gate), 60)
    keep = simulated_fleet.prompts("keep", 60, 24)
    new = simulated_fleet.prompts("new", 60, 24)
    with (
        Load(gate.target, ClosedLoop(USERS, keep)) as kept,
        Load(gate.target, ClosedLoop(NEW_USERS, lambda n: replace(new(n), headers=CLOSE))) as new_users,
    ):
        loads = (kept, new_users)
        wait_until("all clients are served", lambda: all(load.ledger.records for load in loads), 60)
        gone, deleted_at = gateway.owner(gate.key), time.time()
        cluster.kubectl("delete", "pod", gone, "-n", stack.SYSTEM, "--wait=false")
        stack.wait_for_gateways(cluster, gateways)
        wait_until("the next owner has all slots", _owner_decides(gateway, gate), 60)
        owned_s, owner = time.time() - deleted_at, gateway.owner(gate.key)
        wait_until("the deleted pod has ended", lambda: cluster.get("pods", gone, stack.SYSTEM) is None, GONE_S)
        wait_until(
            f"{AFTER_REQUESTS} requests since then",
            lambda: sum(len(load.ledger.since(deleted_at).records) for load in loads) >= AFTER_REQUESTS,
            120,
        )
    print(f"owner {gone}, then {owner} after {owned_s:.0f} s; {[load.ledger.summary() for load in loads]}")
    assert owner != gone
    assert not [failure for load in loads for failure in load.ledger.failures], "\n".join(
        load.ledger.explain() for load in loads if load.ledger.failures
    )


def test_quota_is_exact_across_gateways(gate: Service, gateway: GatewayClient) -> None:
    """A burst of one tenant over connections to all gateways: its quota is that of one."""
    wait_until("each gateway can ask the others", gateway.has_all_peers, 60)
    wait_until("the owner has all slots", _owner_decides(gateway, gate), 60)
    texts, before = simulated_fleet.prompts("quota", 20, 1), gateway.metrics()
    burst = [Arrival(0.0, replace(texts(n), headers=CLOSE + TENANT_HEADER)) for n in range(QUOTA_REQUESTS)]
    start = time.monotonic()
    records = Load(gate.target, OpenLoop(burst)).run().records
    refilled, counts = (time.monotonic() - start) * QUOTA_PER_S, gateway.metrics() - before
    answers = counts.total("plimsoll_gateway_owner_answers_total")
    fallbacks = counts.total("plimsoll_gateway_owner_fallbacks_total")
    results = Counter((r.status, r.reason) for r in records)
    print(f"{dict(results)}; up to {refilled:.1f} refilled, {answers:.0f} by the owner, {fallbacks:.0f} decided alone")
    assert results.keys() == {(200, ""), (429, "quota_exceeded")}
    assert 0 < answers + fallbacks < QUOTA_REQUESTS, "one gateway got all"
    assert QUOTA <= results[200, ""] <= QUOTA + refilled + fallbacks
