"""Three gateways are one: the operator believes what their clients saw, counts that begin anew are counted once, shares
sum to the whole, and an overload is cut to what can be kept, also when one of them dies.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import httpx
import pytest

from e2e.lib import simulated_fleet, stack
from e2e.lib.client import Prompt
from e2e.lib.kube import Cluster, Object
from e2e.lib.load import Load, OpenLoop, poisson
from e2e.lib.metrics import GatewayClient
from e2e.lib.node import signal_container
from e2e.lib.operator import OperatorClient, gateways_read_at, metric_value, observed_at
from e2e.lib.prober import Prober
from e2e.lib.request_log import RequestRecord, RequestResult, nearest_rank
from e2e.lib.service import Service
from e2e.lib.wait import sleep, wait_until
from plimsoll.core.admission.replica import STEP_TIME_RATIO_RANGE

GATEWAYS = 3
LIGHT, OVERLOAD = 2.0, 11.0  # requests/s; the replica carries about 6
LIGHT_S = 36.0  # all of it within the operator's last minute when it is compared
RETRY_HEADER = (("x-stainless-retry-count", "1"),)  # what SDKs send with a second attempt
RETRY_EVERY, RETRY_OFFSET = 5, 4  # of five requests one is sent again that came four before
FIRST, SECOND = "first", "second of"  # labels of these, with a number
KILLED_S = 22.0
MINUTE_S, SLOT_S = 60.0, 5.0  # of what the operator calls the last minute, to the nearest slot
SETTLED_S = 20.0  # after a step in load: the gates have learned what comes
SAMPLED_S = 25.0
SAMPLES = 10
DOCUMENT_PRECISION = 1e-5  # `explain` tells its figures to six digits
ENDPOINT_REMOVAL_S = 5.0  # connections go to a gateway that is no more until the node has heard of it


@pytest.fixture(scope="module")
def three(cluster: Cluster) -> Iterator[None]:
    before = len(stack.gateway_pods(cluster))
    stack.scale_gateways(cluster, GATEWAYS)
    yield
    stack.scale_gateways(cluster, before)


@pytest.fixture(scope="module")
def operator(cluster: Cluster) -> OperatorClient:
    return OperatorClient(cluster, stack.SYSTEM)


@dataclass(frozen=True)
class LearnedService:
    """A service that has had one load since it was made. told: what the operator knew meanwhile and in the end."""

    service: Service
    records: list[RequestRecord]
    reported: list[Object]


@pytest.fixture(scope="module")
def taught(cluster: Cluster, namespace: str, operator: OperatorClient, three: None) -> Iterator[LearnedService]:
    """One replica behind three gateways, all of which know what it carries."""
    cluster.apply(
        simulated_fleet.fleet_manifest("trio", {"serve": simulated_fleet.replica_bounds(1, 1)}), namespace=namespace
    )
    found = Service(cluster, namespace, "trio", stack.GATEWAY_URL)
    found.wait_ready()
    wait_until("all that gateways and engines tell is heard", lambda: _has_full_coverage(operator, found))
    with Load(found.target, poisson(LIGHT, LIGHT_S, _mixed_prompts, seed=1)) as load:
        reported = _collect_documents(operator, found, LIGHT_S)
        load.wait()
        reported.append(wait_until("the operator has heard the end of it", lambda: _final_metrics(operator, found), 20))
    simulated_fleet.wait_limits_published(found)
    yield LearnedService(found, load.ledger.records, reported)
    cluster.kubectl("delete", "plim", "trio", "-n", namespace)


@pytest.fixture(scope="module")
def gate(taught: LearnedService) -> Service:
    return taught.service


def _mixed_prompts(n: int) -> Prompt:
    """Short and long ones, some of which say that they are second attempts, and are not."""
    words, tokens = ((200, 24), (400, 72))[n % 2]
    return replace(simulated_fleet.prompts("mixed", words, tokens)(n), headers=() if n % RETRY_EVERY else RETRY_HEADER)


def _with_retries(rate: float, name: str, seed: int) -> OpenLoop:
    """Poisson arrivals, some of whom are second attempts of requests that came shortly before."""
    first = simulated_fleet.prompts(name, 300, 48)

    def prompt(n: int) -> Prompt:
        again = n >= RETRY_OFFSET and n % RETRY_EVERY == 0
        if again:
            return replace(first(n - RETRY_OFFSET), headers=RETRY_HEADER, labels=((SECOND, str(n - RETRY_OFFSET)),))
        return replace(first(n), labels=((FIRST, str(n)),))

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


def _minute(records: list[RequestRecord], reported: Object) -> tuple[int, int]:
    """First attempts that must be, and that can be, in what the operator calls the last minute."""
    begin = SLOT_S * math.floor((observed_at(reported) - MINUTE_S) / SLOT_S)
    surely = [r for r in _first_attempts(records) if begin + 0.2 <= r.sent_at <= gateways_read_at(reported) - 0.5]
    return len(surely), sum(begin - 1.5 <= r.sent_at <= observed_at(reported) for r in records)


def _shares(service: Service) -> tuple[int, dict[str, int]]:
    """The sequences that a replica may have, and how the gateways were told to share them."""
    limits = service.limits()
    return limits["costModel"]["batch"], limits["shares"]


def _capacity_in_use(gateway: GatewayClient, service: Service) -> tuple[int, int, int]:
    """What the gateways take themselves to have, the most that each had at the replica, and what is there now."""
    try:
        reported = [found["admission"] for found in gateway.services(service.key)]
    except httpx.HTTPError:  # one of them comes or goes
        return 0, 0, 0
    running = gateway.in_flight(service.key).total()
    return sum(one["slots"] for one in reported), sum(one["in_use"] for one in reported), running


def _sample_shares(gateway: GatewayClient, service: Service, seconds: float) -> list[tuple[int, int, int, int, int]]:
    """Once a second: the whole, the sum of the published shares, and what the gateways hold."""
    observed = []
    for _ in range(round(seconds)):
        batch, shares = _shares(service)
        observed.append((batch, sum(shares.values()), *_capacity_in_use(gateway, service)))
        sleep(1.0)
    return observed


def _admitted_within_slo(records: list[RequestRecord]) -> tuple[list[RequestRecord], int]:
    """Those that were let in, and how many of them had the promise."""
    admitted = [r for r in records if r.outcome is not RequestResult.REJECTED]
    return admitted, sum(map(simulated_fleet.within_slo, admitted))


def _shares_assigned(service: Service, cluster: Cluster) -> Callable[[], bool]:
    """Whether the shares are those of the gateways that exist, and sum to the whole."""

    def shared() -> bool:
        batch, shares = _shares(service)
        return (
            shares.keys() == {pod["metadata"]["name"] for pod in stack.gateway_pods(cluster)}
            and sum(shares.values()) == batch
        )

    return shared


def test_operator_metrics_match_client_records(taught: LearnedService, gateway: GatewayClient) -> None:
    """From the gateways' counts and the engine's page alone: arrivals, outcomes, lengths, latency, what runs."""
    records, last = taught.records, taught.reported[-1]
    sent, ok = len(records), [r for r in records if r.ok]
    counted = [reported["requests"] for reported in gateway.services(taught.service.key)]
    total = {name: sum(one[name] for one in counted) for name in ("arrived", "retried", "succeeded", "failed")}
    refused = sum(sum(one["rejected"].values()) for one in counted)
    ticks = [
        (gateways_read_at(one), gateways_read_at(two), metric_value(two, "rate_per_s"))
        for one, two in pairwise(taught.reported)
    ]
    ticks = [tick for tick in ticks if tick[1] - tick[0] < 1.6]  # one right after the other: none was missed
    whole = sum(rate * (end - begin) for begin, end, rate in ticks)
    came = sum(begin < r.sent_at <= end for r in records for begin, end, _ in ticks)
    ttft_s = nearest_rank(sorted(r.ttft_s for r in ok if r.ttft_s is not None), 95)
    prompt, output = (sum(part) / len(ok) for part in zip(*map(_tokens, ok), strict=True))
    running = [_running(records, reported) for reported in taught.reported[:-1]]
    off = sum(abs(believed - there) for believed, there in running) / len(running)
    gateways, lengths = last["metrics"]["gateways"], last["metrics"]["requests"]
    print(f"{sent} sent, {len(ok)} ok; gateways {[one['arrived'] for one in counted]}, {total}, {refused} refused")
    print(f"operator: {gateways['arrivals']:.0f} in the last minute, {whole:.1f} of {came} by {len(ticks)} rates")
    print(f"TTFT p95 {gateways['ttft_s']} s, clients {ttft_s:.3f} s")
    print(f"lengths {lengths}, clients {prompt:.1f} and {output:.1f}")
    print(f"running by engine's word, and sent and not ended: {running}, off by {off:.2f} on average")
    assert not simulated_fleet.unexpected_failures(records), simulated_fleet.format_records(
        simulated_fleet.unexpected_failures(records)
    )
    assert total == {"arrived": sent, "retried": 0, "succeeded": len(ok), "failed": 0}, "a header alone hides no demand"
    assert refused == sent - len(ok)
    assert sum(one["arrived"] > 0 for one in counted) >= 2, "one gateway had it all"
    assert gateways["arrivals"] == sent
    assert gateways["rejected_share"] == pytest.approx(refused / sent, rel=DOCUMENT_PRECISION)
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


def test_gateway_counter_reset_is_counted_once(
    taught: LearnedService, cluster: Cluster, gateway: GatewayClient, operator: OperatorClient
) -> None:
    """Its counts begin at nought again, in the same pod: that is neither a fall in demand nor a leap."""
    allowed = gateway.failures_allowed()
    with Load(taught.service.target, poisson(LIGHT, 300, _mixed_prompts, seed=3)) as load:
        reported = _collect_documents(operator, taught.service, KILLED_S / 3)
        struck_at = time.time()
        signal_container(stack.gateway_pods(cluster)[0], "picker", "KILL")
        reported += _collect_documents(operator, taught.service, KILLED_S * 2 / 3)
        stack.wait_for_gateways(cluster, GATEWAYS)
        whole_at = time.time()
        reported += _collect_documents(operator, taught.service, 4.0)
    allowed = gateway.failures_allowed() - allowed
    taught.records.extend(load.ledger.records)
    records, last = taught.records, reported[-1]
    surely, at_most = _minute(records, last)
    unseen = sum(struck_at - 1.5 <= r.sent_at <= whole_at for r in records)
    rates = Counter(round(metric_value(one, "rate_per_s")) for one in reported)
    print(f"{load.ledger.summary()}; {allowed} passed the gateway unseen, whole after {whole_at - struck_at:.1f} s")
    print(
        f"last minute {metric_value(last, 'arrivals'):.0f}, by clients {surely} to {at_most}; "
        f"rates {sorted(rates.items())}"
    )
    assert not simulated_fleet.unexpected_failures(records), simulated_fleet.format_records(
        simulated_fleet.unexpected_failures(records)
    )
    assert all(metric_value(one, "rate_per_s") >= 0.0 for one in reported)
    assert surely - unseen <= metric_value(last, "arrivals") <= at_most
    assert max(rates) <= 5 * LIGHT, "what was counted before was counted again"


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


def test_capacity_shares_sum_to_total_and_limit_overload(
    taught: LearnedService,
    gate: Service,
    cluster: Cluster,
    gateway: GatewayClient,
    operator: OperatorClient,
    prober: Prober,
) -> None:
    """Under three, and under those that are left when one dies: what it carried is cut, and the others take over."""
    wait_until("each gateway has its share", _shares_assigned(gate, cluster), 60)
    before = _counted(gateway, gate)
    with Load(gate.target, _with_retries(OVERLOAD, "overload", seed=2)) as load:
        sleep(SETTLED_S)
        begin = time.time()
        observed = _sample_shares(gateway, gate, SAMPLED_S)
        document, looks = operator.explain(gate.key), _arrival_intervals(gateway, gate, before)
        counted, counted_at = looks[-1].counted, looks[-1].until
        struck_at = time.time()
        gone = stack.gateway_pods(cluster)[0]["metadata"]["name"]
        prober.allow_failures(struck_at, struck_at + ENDPOINT_REMOVAL_S)
        cluster.kubectl("delete", "pod", gone, "-n", stack.SYSTEM, "--force", "--grace-period=0", "--wait=false")
        stack.wait_for_gateways(cluster, GATEWAYS)
        wait_until("the shares are of those that are there", _shares_assigned(gate, cluster), 60)
        shared_s = time.time() - struck_at
        sleep(SAMPLED_S - min(SAMPLED_S, shared_s))
    records = load.ledger.records
    cut = [
        r for r in simulated_fleet.unexpected_failures(records) if r.overlaps(struck_at, struck_at + ENDPOINT_REMOVAL_S)
    ]  # whoever was at the dead one
    rest = [r for r in records if r not in cut]
    lost = simulated_fleet.unexpected_failures(rest)
    calm = [r for r in rest if begin <= r.sent_at < struck_at]
    after = [r for r in rest if r.sent_at >= struck_at + ENDPOINT_REMOVAL_S]
    print(f"{load.ledger.summary()}\nwhole, shares, units, most in use, running: {observed}")
    print(f"one of three gone: {len(cut)} cut, shared anew after {shared_s:.0f} s: {_shares(gate)}")
    for name, some in (("settled", calm), ("after", after)):
        admitted, kept = _admitted_within_slo(some)
        print(f"{name}: {len(some)} offered, {len(admitted)} let in, {kept} of these within the promise")
        assert 0 < len(admitted) < len(some), "that was no overload"
        assert kept >= 0.95 * len(admitted), name
    surely, at_most = _minute([*taught.records, *records], document)
    arrived = metric_value(document, "arrivals")
    sent = [r for r in records if r.sent_at < counted_at]
    print(f"last minute before that: {arrived:.0f} by the operator, {surely} to {at_most} by clients")
    refused = {dict(r.labels).get(FIRST) for r in sent if r.outcome is RequestResult.REJECTED}
    seconds = [dict(r.labels).get(SECOND) in refused for r in sent if r not in _first_attempts(sent)]
    print(f"until then {len(sent)} sent, {len(seconds)} again of which {sum(seconds)} were refused, {dict(counted)}")
    assert surely <= arrived <= at_most, "what is refused arrives, too"
    assert any(look.counted.total() >= sum(r.sent_at < look.since for r in records) for look in looks), looks
    assert all(look.counted.total() <= sum(r.sent_at < look.until for r in records) for look in looks), looks
    assert counted["retried"] <= sum(seconds), "a header alone hides no demand"
    assert not lost, simulated_fleet.format_records(lost)
    assert any(units == batch for batch, _, units, *_ in observed), "nobody has taken up what was told"
    assert all(shares <= batch for batch, shares, *_ in observed)
    for (before, *_), (batch, _, units, _, running), (after, *_) in zip(
        [observed[0], *observed], observed, [*observed[1:], observed[-1]], strict=False
    ):
        most = max(before, batch, after)  # what is told may change between the status and a gateway's word
        assert units <= most
        assert running <= most / STEP_TIME_RATIO_RANGE[0], (
            "a replica faster than the model holds more, but not the whole thrice"
        )
