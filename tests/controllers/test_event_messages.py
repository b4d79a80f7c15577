"""Every Event is one short sentence, whatever the names, the figures and the quoted text are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import orjson
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.adapters.kube_client import DEPLOYMENTS
from plimsoll.adapters.launcher import AdapterReport
from plimsoll.api import conditions, labels
from plimsoll.api.conditions import ConditionReason
from plimsoll.api.events import MAX_EVENT_MESSAGE_CHARS, Event, EventReason
from plimsoll.api.message_text import ELLIPSIS, join_within, shorten
from plimsoll.api.v1alpha1 import parse
from plimsoll.api.v1alpha1.service_name import MAX_NAME_CHARS
from plimsoll.controllers.autoscale import scaling_conditions
from plimsoll.controllers.autoscale.autoscaler import scaling_spec
from plimsoll.controllers.autoscale.limit_status import LimitTracker
from plimsoll.controllers.autoscale.pod_deletion_cost import ScaleDownSelection
from plimsoll.controllers.autoscale.recommendation_events import recommended_event
from plimsoll.controllers.autoscale.scale_action import ScaleChange
from plimsoll.controllers.autoscale.scaling_status import ScalingReport, initial_report
from plimsoll.controllers.autoscale.signal_health import ConfigVersions, HealthReport, SignalHealth
from plimsoll.controllers.engine_rollout.rollout_plan import plan_rollout
from plimsoll.controllers.engine_rollout.rollout_state import RolloutState
from plimsoll.controllers.inference_pools import pool_conditions
from plimsoll.controllers.reconcile import condition_events, service_status
from plimsoll.controllers.reconcile.drain_reports import DrainTimeout
from plimsoll.controllers.reconcile.engine_publication import left_out_event
from plimsoll.controllers.reconcile.model_names import Former, ModelNames
from plimsoll.controllers.reconcile.observe import NO_RULES, NameState, name_state
from plimsoll.controllers.reconcile.pod_diagnosis import PodProblem
from plimsoll.controllers.reconcile.service_status import StatusInputs
from plimsoll.controllers.reconcile.tier_health import TierStatusInputs
from plimsoll.controllers.reconcile.tuning_status import tuning_events
from plimsoll.controllers.targets.target_state import OtherWriter, ScaledObject, TargetProblem, TargetState, WriterCause
from plimsoll.core.autoscaling.decide import decide
from plimsoll.core.autoscaling.decision_state import DecisionState
from plimsoll.core.autoscaling.inputs import ServiceSnapshot, TierSnapshot
from plimsoll.core.autoscaling.observations import LaggingSignals, ServiceObservation, SizingResult
from plimsoll.core.autoscaling.scale_down_candidates import ReplicaLoad
from plimsoll.core.autoscaling.scaling_decision import ScalingDecision, TierDecision
from plimsoll.core.autoscaling.scaling_policy import ReplicaRateLimit, ScalingPolicy
from plimsoll.core.autoscaling.service_state import ServiceState, TimedDecision
from plimsoll.core.autoscaling.startup_time import StartingPod
from plimsoll.core.capacity.sizing import Infeasible
from plimsoll.core.capacity.tier_model import Constraint
from plimsoll.core.demand.service_metrics import ServiceMetrics
from plimsoll.core.engine_model.kv_transfer import TransferAssessment, TransferStats, assess
from plimsoll.core.ports import GatewayConfigState
from plimsoll.core.routing.model_names import NameClaim, NameRules
from plimsoll.core.slo import Slo
from plimsoll.core.types import Unavailable
from plimsoll.engines.registry import ENGINES
from plimsoll.resources.engine_tuning import StoredArgument
from plimsoll.resources.platform_config import EngineRolloutSettings
from tests import builders
from tests.api.manifests import adopted
from tests.core.scaling_fixtures import decide_one, idle_status, make_forecast, observed_tier, replica_bounds

Object = dict[str, Any]

NAME, NAMESPACE = "n" * MAX_NAME_CHARS, "s" * 63
OTHER = f"{'o' * 63}/{'m' * MAX_NAME_CHARS}"
POD = f"{NAME}-prefill-{'a' * 10}-{'b' * 5}"[:63]
PARENT = builders.service(NAME, NAMESPACE)
QUOTE = "0/5000 nodes are available: 4000 Insufficient nvidia.com/gpu, 1000 node(s) had untolerated taint " * 20
MANY = 99_999
PODS = 999
LONG_S = 86_399.7
SLO_MET = conditions.Condition(conditions.ConditionType.SLO_MET, True, ConditionReason.SLO_MET, "met")
SLO = Slo(0.9999, 3599.9, 0.0, 3599.9, 3599.9)


def tier_inputs(role: str, problem: Object | None = None, status: Object | None = None) -> TierStatusInputs:
    """A tier with a problem of one pod or of its Deployment, else with all pods ready."""
    if problem is not None:
        pods = (builders.pod(PARENT, role, POD, **problem),)
    else:
        pod = builders.pod(PARENT, role, POD, conditions=[{"type": "Ready", "status": "True"}])
        pods = (pod,) * (PODS if status is None else 0)
    deployment = builders.deployment(PARENT, role, replicas=PODS, ready=len(pods), status=status)
    return TierStatusInputs(role, PODS, deployment, pods)


def status_inputs(*tiers: TierStatusInputs, **other: Any) -> StatusInputs:
    facts: Object = {
        "routable_endpoints": 1,
        "gateway_replicas": 3,
        "model_names": ModelNames(("chat",)),
        "url": "http://g/v1",
    }
    return StatusInputs(PARENT, tiers or (tier_inputs("prefill"), tier_inputs("decode")), **(facts | other))


def waiting(reason: str) -> Object:
    state = {"waiting": {"reason": reason, "message": QUOTE}}
    return {"containerStatuses": [{"image": f"registry/{'i' * 250}", "state": state}]}


UNSCHEDULABLE = {"conditions": [{"type": "PodScheduled", "status": "False", "message": QUOTE}]}
CRASHED = {"containerStatuses": [{"ready": False, "state": {}, "lastState": {
    "terminated": {"reason": "Error", "exitCode": 137, "message": QUOTE}}}]}  # fmt: skip
FAILED = {"phase": "Failed", "reason": "Evicted", "message": QUOTE}
SILENT = {"conditions": [{"type": "Ready", "status": "False"}, {"type": "ContainersReady", "status": "True"}]}
WITHOUT_VOLUME = PodProblem(ConditionReason.VOLUME_UNAVAILABLE, f"pod {POD} waits for a volume (FailedMount): {QUOTE}")
REJECTED = {"conditions": [{"type": "ReplicaFailure", "status": "True", "message": QUOTE}]}


def report(*held: conditions.Condition, slow: str | None = None) -> ScalingReport:
    return replace(initial_report(None, 0.0), conditions=held, slow_transfer_message=slow)


def transition_events(new: StatusInputs, old: StatusInputs) -> Iterator[Event]:
    before = conditions.merge([], service_status.build_conditions(old), "2026-01-01T00:00:00Z")
    recovered = service_status.recovery_messages(new)
    yield from condition_events.changed_events(before, service_status.build_conditions(new), recovered, "7")


def name_states() -> Iterator[NameState]:
    """A service of long names that may not have its model name, for each reason."""
    namespace, _, name = OTHER.partition("/")
    own = NameClaim(namespace, name, "m" * 253, "2026-01-01T00:00:00Z")
    holder = replace(own, namespace="n" * 63, granted=own.model, since="2026-01-01T00:00:00.000000Z")
    for claim, others, rules in (
        (own, [holder], NO_RULES),
        (own, [replace(holder, granted="", since="", created="2025-01-01T00:00:00Z")], NO_RULES),
        (own, [replace(holder, model=OTHER, granted=OTHER)], NO_RULES),
        (own, [], NameRules(short_name_namespaces=frozenset({"other"}))),
        (replace(own, model="o" * 63 + "/m"), [], NameRules(service_namespaces=frozenset({"o" * 63}))),
    ):
        yield name_state(claim, [claim, *others], rules)


def adapter_troubles() -> Iterator[StatusInputs]:
    """Adapters of long names that do not have them, for each reason, or that no engine can load."""
    namespace, _, service = OTHER.partition("/")
    own = NameClaim(namespace, f"{service}/{'a' * 128}", "a" * 128, "2026-01-01T00:00:00Z")
    holder = replace(own, namespace="n" * 63, granted=own.model, since="2026-01-01T00:00:00.000000Z")
    for claim, others, rules in (
        (own, [holder], NO_RULES),
        (own, [replace(holder, granted="", since="", created="2025-01-01T00:00:00Z")], NO_RULES),
        (own, [], NameRules(short_name_namespaces=frozenset({"other"}))),
        (replace(own, model="o" * 63 + "/m"), [], NameRules(service_namespaces=frozenset({"o" * 63}))),
    ):
        yield status_inputs(adapter_names=(name_state(claim, [claim, *others], rules),) * 2)
    free = name_state(own, [own], NO_RULES)
    yield status_inputs(adapter_names=(free, free), adapters={POD: {"a" * 128: AdapterReport(False, QUOTE)}})


def all_condition_events() -> Iterator[Event]:
    """The Events of all conditions, at a change to trouble and back."""
    good = status_inputs(fallback=(OTHER, ""))
    names = tuple("m" * 253 for _ in range(8))
    former = tuple(Former("m" * 253, "2026-01-01T00:00:00Z") for _ in range(6))
    named = status_inputs(url="http://" + "u" * 2000, model_names=ModelNames(names, former, "m" * 253))
    troubles = [
        status_inputs(spec_problems=(QUOTE, QUOTE, QUOTE), routable_endpoints=0),
        status_inputs(rejection=QUOTE, routable_endpoints=0),
        status_inputs(routable_endpoints=None, gateways_error=QUOTE),
        status_inputs(routable_endpoints=None, gateway_replicas=0),
        status_inputs(routable_endpoints=0),
        *(replace(named, name_state=state, routable_endpoints=0) for state in name_states()),
        status_inputs(fallback=(OTHER, f"falls back to this service (cycle: {' -> '.join([OTHER] * 9)})")),
        status_inputs(scaling_report=report(slow=slow_transfer())),
        *adapter_troubles(),
        *target_troubles(),
        *(status_inputs(engine_rollout=condition) for condition in rollout_conditions()),
        *(status_inputs(inference_pool=condition) for condition in pool_troubles()),
        *(
            status_inputs(tier_inputs("prefill", problem), tier_inputs("decode", problem), routable_endpoints=0)
            for problem in (
                UNSCHEDULABLE,
                CRASHED,
                FAILED,
                SILENT,
                waiting("ErrImagePull"),
                waiting("CreateContainerConfigError"),
            )
        ),
        status_inputs(tier_inputs("decode", status=REJECTED), routable_endpoints=0),
        status_inputs(
            replace(tier_inputs("decode", {"phase": "Pending"}), volume_problem=WITHOUT_VOLUME), routable_endpoints=0
        ),
    ]
    for trouble in troubles:
        yield from transition_events(trouble, good)
        yield from transition_events(named, trouble)
    for held in emitting_conditions():
        troubled, well = (status_inputs(scaling_report=report(SLO_MET, *others)) for others in ((held,), ()))
        for first, second in ((troubled, well), (well, troubled)):
            yield from transition_events(first, second)


def rollout_conditions() -> Iterator[conditions.Condition]:
    """A service that the platform's rollout has reached, and one that stops it."""
    key, settings = (NAMESPACE, NAME), EngineRolloutSettings(generation=2**31 - 1, min_ready_seconds=86_400)
    failure = f"Deployment {NAME}-prefill does not progress (ProgressDeadlineExceeded)"
    for now in (
        RolloutState(key, (True, 0.0), is_current=False),
        RolloutState(key, (True, 0.0), is_current=True, rolled_at_s=0.0, is_settled=False, failure=failure),
    ):
        yield plan_rollout((now,), settings, frozenset(), 0.0).conditions[key]


def pool_troubles() -> Iterator[conditions.Condition]:
    """An InferencePool that cannot be made, that somebody else has, and that a gateway refuses; names are long."""
    refusal = {"type": "ResolvedRefs", "status": "False", "reason": "r" * 1024, "message": QUOTE}
    parent = {"parentRef": {"name": "g" * 253, "namespace": "n" * 63}, "conditions": [refusal]}
    owners = [{"kind": "k" * 63, "name": "o" * 253}] * 2
    pool = {"metadata": {"name": "p" * 63, "ownerReferences": owners}, "status": {"parents": [parent]}}
    refused = pool_conditions.not_accepted(pool)
    assert refused is not None
    yield from (pool_conditions.KIND_MISSING, pool_conditions.rejected(QUOTE), refused)
    yield pool_conditions.taken(pool, ("selector.matchLabels must be others",) * 3)


def target_troubles() -> Iterator[StatusInputs]:
    """A target that cannot be used, and one whose count something of a long name sets."""
    target = parse(adopted(**{"spec.targets.serve.scaleTargetRef.name": "o" * 253})).spec.targets
    assert target is not None
    problem = TargetProblem(ConditionReason.TARGET_FORBIDDEN, QUOTE)
    other_writer = OtherWriter(WriterCause.AUTOSCALER, f"HorizontalPodAutoscaler {'h' * 253}")
    clause = f"{target.serve.scale_target_ref.label} is scaled by {other_writer.name}"
    owned = scaling_conditions.scaling_inactive(scaling_spec(parse(adopted()), 0.0), ENGINES["vllm"], {}, clause)
    assert owned is not None
    yield status_inputs(targets={"serve": TargetState(target.serve, problem=problem)})
    yield status_inputs(
        targets={"serve": TargetState(target.serve, other_writer=other_writer)}, scaling_report=report(owned)
    )


def slow_transfer() -> str:
    assessment = assess(TransferStats(1e5, 1234.567 * 1e5, 1233.456 * 1e5), 0.000_123_4)
    assert isinstance(assessment, TransferAssessment)
    return assessment.message


def emitting_conditions() -> Iterator[conditions.Condition]:
    """The scaling conditions that emit Events, from their builders."""
    tiers = ("prefill", "decode")
    yield from (
        found
        for health in (
            HealthReport(True),
            HealthReport(silent_tiers=tiers),
            HealthReport(unselected=tuple((name, MANY) for name in tiers)),
        )
        if (found := scaling_conditions.metrics_degraded(ServiceSnapshot(ServiceMetrics(0.0), {}), health, 8001))
        is not None
    )
    state = ServiceState.for_roles(["prefill", "decode"])
    infeasible = Infeasible(Constraint.ITL, replace(SLO, itl_s=3599.9), "a prefill tier makes the gaps shorter, " * 5)
    sizing = SizingResult(
        MANY, MANY, 123_456.7, 0.000_123, 9876.5, Constraint.TTFT, 0.8, 0.6, 3599.9, None, infeasible=infeasible
    )
    state.sizings = dict.fromkeys(tiers, sizing)
    infeasible_slo = scaling_conditions.slo_infeasible(state)
    assert infeasible_slo is not None
    yield infeasible_slo
    decision = TierDecision(MANY, (), etas_s=(LONG_S,) * MANY)
    state.last_decision = TimedDecision(0.0, ScalingDecision(dict.fromkeys(tiers, decision), "decode", DecisionState()))
    overload = ServiceMetrics(123_456.7, rejected_share=0.999, arrivals=1e9)
    snapshot = ServiceSnapshot(overload, dict.fromkeys(tiers, TierSnapshot(MANY, MANY)))
    starting = {"count": MANY, "nextReady": "2026-01-01T00:00:00Z"}
    for found in (
        scaling_conditions.shedding(state, snapshot, (), starting),
        scaling_conditions.replicas_contested(HealthReport(contested=f"{QUOTE} sets the replica count of prefill")),
        scaling_conditions.gateway_config_stale(HealthReport(stale_gateways=stale_gateways())),
    ):
        assert found is not None
        yield found
    for limited in limited_decisions():
        decision_of = ScalingDecision({"prefill": limited}, None, DecisionState())
        found = LimitTracker().update(decision_of, 0.0)
        assert found.holds
        yield found


def stale_gateways() -> str:
    health = SignalHealth()
    states = [
        GatewayConfigState("1", False, QUOTE, "8"), GatewayConfigState("1", True, "", "8"),
        GatewayConfigState("9", False, "", "8"), GatewayConfigState("9", False), GatewayConfigState("9", True, "", "1"),
        GatewayConfigState("9", True, QUOTE, "8"),
    ]  # fmt: skip
    message = None
    for now_s in (0.0, 100.0):
        for number, config_state in enumerate(states):
            health.record(f"gateway-{number}", config_state, ConfigVersions(5, 8), now_s)
        found = health.report(
            ServiceSnapshot(ServiceMetrics(0.0), {}), True, [f"gateway-{n}" for n in range(len(states))], now_s
        )
        message = found.stale_gateways
    assert message is not None
    return message


def limited_decisions() -> Iterator[TierDecision]:
    """A decision for each limit that withholds replicas, and one with all of them."""
    need = observed_tier(make_forecast(987.6), 99, sizing=sized(MANY))
    pending = replace(need, starting=(StartingPod(POD, 0.0, unschedulable_reason=QUOTE),) * 3)
    slow = ReplicaRateLimit(1, LONG_S)
    for tier, granted in ((need, None), (pending, None), (need, 100), (pending, 100)):
        for policy in (replica_bounds(1, 100), replica_bounds(1, MANY, scale_up_limit=slow)):
            observation = ServiceObservation({"serve": tier}, DecisionState(), granted)
            yield decide(observation, ScalingPolicy({"serve": policy}, SLO), 0.0).tiers["serve"]


def sized(replicas: int) -> SizingResult:
    return SizingResult(
        replicas, replicas, 123_456.7, 0.000_123_4, 98_765.4, Constraint.TTFT, 0.123, 0.045, 3599.9, None,
        headroom=0.5, capacity_correction=12.34,
    )  # fmt: skip


def scale_events() -> Iterator[Event]:
    deletion = ScaleDownSelection(
        MANY, tuple((builders.pod(PARENT, "prefill", POD), ReplicaLoad(1e6, None)) for _ in range(50)), ()
    ).summary
    unknown = Unavailable(QUOTE[:100])
    slow = LaggingSignals(ttft_s=3599.9, tpot_s=3599.9, waiting=1e9)
    decisions = [
        decide_one(observed_tier(make_forecast(987.6), 2, sizing=sized(MANY)), replica_bounds(1, MANY // 2)),
        decide_one(
            observed_tier(make_forecast(987.6), 2, sizing=sized(MANY)),
            replica_bounds(1, MANY // 2, warm_replicas=MANY, scale_up_limit=ReplicaRateLimit(MANY, LONG_S)),
        ),
        decide_one(observed_tier(unknown, 2, lagging=slow), replica_bounds(1, MANY)),
        decide_one(
            observed_tier(make_forecast(0.0), 1, sizing=sized(0)), replica_bounds(0), pause=idle_status(LONG_S * 9)
        ),
        decide_one(observed_tier(make_forecast(0.0), 0, sizing=sized(0), backlog_gpu_s=123_456.7), replica_bounds(0)),
        decide_one(observed_tier(unknown, 1), replica_bounds(0), pause=idle_status(LONG_S)),
        shrinking_decision(),
    ]
    for decision in decisions:
        assert decision.previous_replicas is not None
        assert decision.previous_replicas != decision.replicas
        change = scale_change("prefill", decision.previous_replicas, decision)
        yield change.event()
        yield change.event(deletion)
        yield scale_change("prefill", decision.replicas + 1, decision).event(deletion)
        yield scale_change("prefill", max(0, decision.replicas - 1), decision).event()
        yield recommended_event("prefill", decision, MANY, QUOTE, 1e9)
        writer = f"Deployment {NAME} is scaled by HorizontalPodAutoscaler {NAME}"
        yield recommended_event("prefill", decision, decision.replicas, writer, 1e9)


def scale_change(tier: str, replicas_before: int, decision: TierDecision) -> ScaleChange:
    metadata = builders.deployment(PARENT, tier)["metadata"]
    return ScaleChange(PARENT, ScaledObject(DEPLOYMENTS, metadata, replicas_before, is_owned=True), tier, decision)


def shrinking_decision() -> TierDecision:
    """A scale-down after its stabilization window; the state of one decision goes into the next."""
    tier = observed_tier(make_forecast(0.5), MANY, sizing=sized(3))
    state = DecisionState()
    for now_s in (0.0, 5e4, 1e5, 2e5):
        decision = decide(
            ServiceObservation({"serve": tier}, state), ScalingPolicy({"serve": replica_bounds(1, MANY)}, SLO), now_s
        )
        state = decision.state
    return decision.tiers["serve"]


def drain_events() -> Iterator[Event]:
    for aborted in (None, 1, MANY):
        yield DrainTimeout((NAMESPACE, NAME), "prefill", POD, "uid", aborted, LONG_S).event


def release_event() -> Event:
    """Of a service in a namespace that another release holds."""
    release = f"{'r' * 53}.{'n' * 63}"
    return Event(EventReason.OTHER_RELEASE, service_status.other_release("s" * 63, release).event_message, release)


def tuning_event() -> Event:
    rows = [StoredArgument("--flag", MANY, f"--cudagraph-capture-sizes up to {MANY} (mixture of experts)", "r" * 300)]
    text = orjson.dumps([asdict(one) for one in rows]).decode()
    metadata = {"name": "x", "labels": {labels.ROLE: "prefill"}}
    revision = {"metadata": metadata, "data": {"metadata": {"annotations": {labels.TUNING: text}}}}
    (event,) = tuning_events({}, [revision])
    return event


def all_events() -> list[Event]:
    others = release_event(), tuning_event(), left_out_event(MANY)
    return [*all_condition_events(), *scale_events(), *drain_events(), *others]


def test_every_event_is_short_without_the_guard() -> None:
    events = all_events()
    assert {event.reason for event in events} == set(EventReason)
    too_long = {event.message: len(event.message) for event in events if len(event.message) > MAX_EVENT_MESSAGE_CHARS}
    assert too_long == {}
    assert {event.manifest(PARENT, "o", "t")["message"] for event in events} == {event.message for event in events}


def test_event_and_condition_hold_no_secret() -> None:
    words = "pod x: the engine terminated (Error, exit code 1): GET https://me:s3cr3t@hub/x --hf-token s3cr3t"
    condition = conditions.Condition(
        conditions.ConditionType.SERVE_DEGRADED, True, ConditionReason.ENGINE_FAILING, words
    )
    (stated,) = conditions.merge([], (condition,), "2026-01-01T00:00:00Z")
    event = Event(EventReason.ENGINE_FAILING, words).manifest(PARENT, "x", "2026-01-01T00:00:00Z")
    assert stated["message"] == event["message"] == words.replace("me:s3cr3t", "***").replace("s3cr3t", "***")


def test_scale_event_of_usual_names_has_all_clauses() -> None:
    decision = decide_one(observed_tier(make_forecast(41.0), 2), replica_bounds(1, 30))
    assert scale_change("decode", 2, decision).event().message == (
        "decode 2 -> 30: forecast 410 req/s in 60 s needs 41 (SLO capacity 10 req/s each);"
        " 41 needed, maxReplicas is 30; 2 would give p95 TPOT 71 ms, target 50 ms"
    )


def test_long_event_is_cut_after_a_word() -> None:
    message = Event(EventReason.READY, "word " * 100).manifest(PARENT, "o", "t")["message"]
    assert message == "word " * 48 + "word" + ELLIPSIS
    assert len(message) <= MAX_EVENT_MESSAGE_CHARS


@given(st.text(max_size=300), st.integers(4, 200))
def test_shorten_stays_within_limit(text: str, limit: int) -> None:
    found = shorten(text, limit)
    assert len(found) <= limit
    assert found == text if len(text) <= limit else found.endswith(ELLIPSIS)


def test_join_within_leaves_out_whole_clauses() -> None:
    assert join_within(20, "first", "a clause that is too long", "", "third") == "first; third"
