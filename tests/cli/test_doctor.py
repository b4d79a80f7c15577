"""What the doctor finds in the objects of one service, and that it says what it could not read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from plimsoll.api import labels
from plimsoll.cli.cluster import ClusterQueryError
from plimsoll.cli.doctor import (
    EVENTS,
    HORIZONTALPODAUTOSCALERS,
    INFERENCEPOOLS,
    MAX_FINDINGS_PER_KIND,
    Patient,
    diagnose,
    examine,
)
from plimsoll.cli.findings import NODES, NOTE, PROBLEM, UNCHECKED, Finding, exit_status, findings_lines
from plimsoll.cli.output import Screen
from plimsoll.controllers.reconcile import pod_diagnosis
from plimsoll.core.errors import BackendUnavailable, Forbidden
from tests import builders
from tests.cli import fake_kube

Object = dict[str, Any]

NOW_S = 1767229200.0  # 2026-01-01T01:00:00Z
READY = {"type": "Ready", "status": "True", "reason": "Serving", "message": "clients reach it"}
PODS, DEPLOYMENTS = "/api/v1/namespaces/team/pods", "/apis/apps/v1/namespaces/team/deployments"


def service(*conditions: Object, **status: Any) -> Object:
    made = builders.service()
    made["metadata"]["generation"] = 2
    return made | {"status": {"observedGeneration": 2, "conditions": [READY, *conditions], **status}}


def healthy(**changes: Any) -> Patient:
    parent = service()
    deployment = builders.deployment(parent, "decode", replicas=1, ready=1)
    pod = builders.pod(parent, "decode", "chat-decode-a", conditions=[{"type": "Ready", "status": "True"}])
    facts: dict[str, Any] = {
        "service": parent,
        "workloads": [deployment],
        "pods": [pod],
        "events": [],
        "autoscalers": [],
        "nodes": [{"metadata": {"name": "n", "labels": {"gpu": "h100"}}}],
        "document": {"metrics": {"gateways": {"rate_per_s": 3.0, "in_flight": 2.0}, "tiers": {}}},
    }
    return Patient(**(facts | changes))


def unpulled(message: str, image: str = "i") -> dict[str, Any]:
    """Status of a pod whose image cannot be pulled."""
    waiting = {"reason": "ImagePullBackOff", "message": message}
    return {"containerStatuses": [{"image": image, "state": {"waiting": waiting}}]}


def findings_of(patient: Patient) -> list[tuple[str, str, str]]:
    return [(one.level, one.subject, one.message) for one in diagnose(patient, "plimsoll-system", NOW_S)]


def test_doctor_healthy_service_has_no_finding() -> None:
    assert findings_of(healthy()) == []


def test_doctor_nothing_but_the_service_is_no_problem() -> None:
    assert findings_of(Patient(service())) == []


@pytest.mark.parametrize(
    ("parents", "is_used"),
    [
        ([], False),
        ([{"parentRef": {"kind": "Gateway", "name": "front"}}], True),
    ],
)
async def test_doctor_notes_a_pool_without_gateway(parents: list[Object], is_used: bool) -> None:
    pool = {"metadata": {"name": "chat", "namespace": "team"}, "status": {"parents": parents}}
    answers = {fake_kube.services("team", "chat"): service(), INFERENCEPOOLS.path("team", "chat"): pool}
    findings = await examine(fake_kube.FakeKube(answers), "team", "chat", "plimsoll-system", NOW_S)
    assert [(one.level, one.subject) for one in findings if one.level == NOTE] == (
        [] if is_used else [(NOTE, "inferencepool chat")]
    )


@pytest.mark.parametrize(
    ("condition", "level"),
    [
        ({"type": "MetricsDegraded", "status": "True"}, PROBLEM),
        ({"type": "SLOMet", "status": "False"}, PROBLEM),
        ({"type": "SLOMet", "status": "Unknown"}, NOTE),
        ({"type": "Reconciling", "status": "True"}, NOTE),
        ({"type": "MetricsDegraded", "status": "False"}, None),
    ],
)
def test_doctor_tells_conditions_by_their_meaning(condition: Object, level: str | None) -> None:
    findings = findings_of(healthy(service=service(condition | {"reason": "Why", "message": "so"})))
    assert findings == ([] if level is None else [(level, condition["type"], "Why: so")])


def test_doctor_status_of_older_spec_is_a_problem() -> None:
    [(level, subject, message)] = findings_of(healthy(service=service(observedGeneration=1)))
    assert (level, subject) == (PROBLEM, "operator")
    assert message == "the status is of generation 1, the spec of 2: the operator is behind"
    bare = builders.service()
    assert findings_of(healthy(service=bare))[0][2] == "no operator has written a status yet"


def test_doctor_quotes_pods_and_bounds_their_number() -> None:
    parent = service()
    broken = [builders.pod(parent, "decode", f"p{n}", **unpulled("no such image", f"i{n}")) for n in range(9)]
    restarted = builders.pod(parent, "decode", "q", containerStatuses=[{"ready": True, "restartCount": 3, "state": {}}])
    findings = findings_of(healthy(pods=[restarted, *broken]))
    assert findings[0] == (PROBLEM, "pod p0", "ImageUnavailable: pod p0: no such image (image i0)")
    assert [one[0] for one in findings] == [*[PROBLEM] * MAX_FINDINGS_PER_KIND, NOTE]
    assert findings[-1][2] == "5 more have restarted or have problems"
    assert findings_of(healthy(pods=[restarted])) == [(NOTE, "pod q", "its containers have restarted 3 times")]


def test_doctor_start_and_single_restart_are_notes() -> None:
    starting = {"type": "Ready", "status": "False", "reason": "Starting", "message": "decode: 0 of 1 ready: 1 starting"}
    unknown = {"type": "ScalingInactive", "status": "True", "reason": "DemandUnknown", "message": "frozen"}
    restarted = builders.pod(builders.service(), "decode", "q", containerStatuses=[{"restartCount": 1, "state": {}}])
    young = service(unknown)
    young["status"]["conditions"][0] = starting
    findings = findings_of(healthy(service=young, pods=[restarted]))
    assert [level for level, _, _ in findings] == [NOTE, NOTE, NOTE]
    assert findings[-1][2] == "its containers have restarted once"
    assert findings_of(healthy(service=service(unknown)))[0][0] == PROBLEM, "of a service that serves"


def test_doctor_problem_of_a_pod_is_listed_once() -> None:
    parent = builders.service()
    waiting = {"state": {"waiting": {"reason": "ImagePullBackOff", "message": "not found"}}}
    pod = builders.pod(parent, "decode", "q", containerStatuses=[waiting])
    problem = pod_diagnosis.pod_problem(pod)
    assert problem is not None
    degraded = {"type": "DecodeDegraded", "status": "True", "reason": str(problem.reason)}
    degraded["message"] = f"0 of 1 ready: {problem.message}"
    [finding] = diagnose(healthy(service=service(degraded), pods=[pod]), "plimsoll-system", NOW_S)
    assert (finding.level, finding.subject) == (PROBLEM, "DecodeDegraded")
    assert finding.remedy == "kubectl -n team describe pod q"


def test_doctor_wrong_image_of_several_pods_is_one_problem() -> None:
    parent = builders.service()
    pods = [
        builders.pod(parent, "decode", "a", **unpulled("Back-off pulling image i")),
        builders.pod(parent, "decode", "b", **unpulled("manifest unknown")),
    ]
    assert [one[1] for one in findings_of(healthy(pods=pods))] == ["pod a"]
    message = "0 of 2 ready: pod a: Back-off pulling image i (image i)"
    stated = {"reason": "ImageUnavailable", "message": message}
    ready, degraded = (
        stated | {"type": "Ready", "status": "False"},
        stated | {"type": "DecodeDegraded", "status": "True"},
    )
    starting = service(degraded)
    starting["status"]["conditions"][0] = ready
    [finding] = diagnose(healthy(service=starting, pods=pods), "plimsoll-system", NOW_S)
    assert (finding.subject, finding.message) == ("Ready", f"ImageUnavailable: {message}")
    assert finding.remedy == "kubectl -n team describe pod a"


def test_doctor_labels_that_match_nothing() -> None:
    patient = healthy(pods=[])
    message = "Deployment chat-decode has 1 in status.replicas, and no pod has its labels"
    assert findings_of(patient) == [(PROBLEM, "tier decode", message)]
    stated = {"type": "MetricsDegraded", "status": "True", "reason": "LabelsMatchNothing", "message": "so"}
    [(_, subject, _)] = findings_of(replace(patient, service=service(stated)))
    assert subject == "MetricsDegraded", "one problem, one finding"
    patient.workloads[0]["status"]["replicas"] = 0
    message = "1 replicas are desired, and no pod has its labels"
    assert findings_of(patient) == [(PROBLEM, "tier decode", message)]
    patient = healthy()
    spec = {"replicas": 1, "template": {"spec": {"nodeSelector": {"gpu": "h200"}}}}
    deployment = patient.workloads[0] | {"spec": spec}
    assert findings_of(healthy(workloads=[deployment])) == [(PROBLEM, "tier decode", "no node has the labels gpu=h200")]
    spec["template"] = {"spec": {"nodeSelector": {"gpu": "h100"}}}
    assert findings_of(healthy(workloads=[deployment])) == []


async def test_doctor_reads_leader_worker_sets() -> None:
    parent = service()
    parent["spec"]["tiers"] = {"serve": {"nodes": 2}}
    found = builders.leader_worker_set(parent)
    found["spec"]["leaderWorkerTemplate"]["leaderTemplate"]["spec"]["nodeSelector"] = {"gpu": "h200"}
    fields = {"manager": "kubectl-edit", "fieldsV1": {"f:spec": {"f:replicas": {}}}}
    found["metadata"]["managedFields"] = [fields]
    found["status"]["replicas"] = 0
    sets = f"/apis/{labels.SET_API_VERSION}/namespaces/team/{labels.SET_PLURAL}"
    scaler = {"metadata": {"name": "x"}, "spec": {"scaleTargetRef": {"kind": labels.SET_KIND, "name": "chat-serve"}}}
    answers = {
        fake_kube.services("team", "chat"): parent,
        fake_kube.LEASE: {"spec": {"holderIdentity": "o"}},
        fake_kube.explanation("o", "team", "chat"): {},
        sets: {"items": [found]},
        NODES.path(): {"items": [{"metadata": {"name": "n", "labels": {"gpu": "h100"}}}]},
        HORIZONTALPODAUTOSCALERS.path("team"): {"items": [scaler]},
    }
    findings = await examine(fake_kube.FakeKube(answers), "team", "chat", "plimsoll-system", NOW_S)
    assert [(one.subject, one.message) for one in findings] == [
        ("tier serve", "1 replicas are desired, and no pod has its labels"),
        ("tier serve", "no node has the labels gpu=h200"),
        ("hpa x", "it scales LeaderWorkerSet chat-serve, which Plimsoll scales too: the two undo each other"),
        ("tier serve", "its replica count was last set by kubectl-edit, not by Plimsoll"),
    ]
    assert findings[0].remedy == "see the Events of LeaderWorkerSet chat-serve for a quota or a webhook"


@pytest.mark.parametrize(("kind", "name"), [("Deployment", "chat-decode"), (labels.KIND, "chat")])
def test_doctor_names_other_autoscalers(kind: str, name: str) -> None:
    scaler = {"metadata": {"name": "theirs"}, "spec": {"scaleTargetRef": {"kind": kind, "name": name}}}
    other = {"metadata": {"name": "other"}, "spec": {"scaleTargetRef": {"kind": "Deployment", "name": "web"}}}
    [(level, subject, message)] = findings_of(healthy(autoscalers=[other, scaler]))
    assert (level, subject) == (PROBLEM, "hpa theirs")
    assert message == f"it scales {kind} {name}, which Plimsoll scales too: the two undo each other"


@pytest.mark.parametrize("scaling", [{"mode": "Recommend"}, {"mode": "Off"}, {"paused": True}])
def test_doctor_others_may_scale_what_plimsoll_does_not(scaling: Object) -> None:
    patient = healthy()
    patient.service["spec"]["scaling"] = scaling
    fields = {"manager": "kube-controller-manager", "fieldsV1": {"f:spec": {"f:replicas": {}}}}
    patient.workloads[0]["metadata"]["managedFields"] = [fields]
    reference = {"kind": "Deployment", "name": "chat-decode"}
    scaler = {"metadata": {"name": "keda-hpa-chat"}, "spec": {"scaleTargetRef": reference}}
    assert findings_of(replace(patient, autoscalers=[scaler])) == []


def test_doctor_names_who_set_the_replicas() -> None:
    patient = healthy()
    fields = {"manager": "kubectl-edit", "fieldsV1": {"f:spec": {"f:replicas": {}}}}
    patient.workloads[0]["metadata"]["managedFields"] = [fields]
    message = "its replica count was last set by kubectl-edit, not by Plimsoll"
    assert findings_of(patient) == [(NOTE, "tier decode", message)]
    stated = {"type": "ReplicasContested", "status": "True", "reason": "ReplicasOwned", "message": "x sets it"}
    [(level, subject, _)] = findings_of(replace(patient, service=service(stated)))
    assert (level, subject) == (PROBLEM, "ReplicasContested"), "one problem, one finding"


@pytest.mark.parametrize(("in_flight", "is_bypassed"), [(0.0, True), (4.0, False)])
def test_doctor_requests_that_no_gateway_sent(in_flight: float, is_bypassed: bool) -> None:
    gateways = {"rate_per_s": 0.0, "in_flight": in_flight}
    document = {"metrics": {"gateways": gateways, "tiers": {"serve": {"running": 4.0}}}}
    findings = findings_of(healthy(document=document))
    message = "engines run 4 requests, and no gateway has sent one: demand is not seen"
    assert findings == ([(PROBLEM, "traffic", message)] if is_bypassed else [])
    stated = {"type": "MetricsDegraded", "status": "True", "reason": "GatewaysBypassed", "message": "so"}
    [(_, subject, _)] = findings_of(healthy(document=document, service=service(stated)))
    assert subject == "MetricsDegraded", "one problem, one finding"


def test_doctor_requests_of_targets_need_no_gateway() -> None:
    patient = healthy(document={"metrics": {"tiers": {"serve": {"running": 4.0}}}})
    assert findings_of(patient)
    targets = {"serve": {"scaleTargetRef": {"name": "llm"}}}
    assert findings_of(replace(patient, service={**patient.service, "spec": {"targets": targets}})) == []


def test_doctor_shows_recent_warnings_of_own_objects() -> None:
    def event(name: str, at: str, kind: str = "Warning") -> Object:
        involved = {"kind": "Pod", "name": name}
        return {"type": kind, "reason": "Failed", "message": "no", "lastTimestamp": at, "involvedObject": involved}

    events = [
        event("chat-decode-a", "2026-01-01T00:58:00Z"),
        event("chat-decode-a", "2025-12-31T20:00:00Z"),
        event("other", "2026-01-01T00:58:00Z"),
        event("chat-decode-a", "2026-01-01T00:58:00Z", "Normal"),
    ]
    assert findings_of(healthy(events=events)) == [(NOTE, "Pod chat-decode-a", "2m ago, Failed: no")]


def test_doctor_counts_a_repeated_event_from_its_last_time() -> None:
    """Such as FailedScheduling of a pod that has been waiting for hours: only its series has the last time."""
    event = {
        "type": "Warning", "reason": "FailedScheduling", "message": "no GPU", "eventTime": "2025-12-31T20:00:00.1Z",
        "series": {"count": 40, "lastObservedTime": "2026-01-01T00:58:00.000000Z"},
        "involvedObject": {"kind": "Pod", "name": "chat-decode-a"},
    }  # fmt: skip
    assert findings_of(healthy(events=[event])) == [(NOTE, "Pod chat-decode-a", "2m ago, FailedScheduling: no GPU")]


@pytest.mark.parametrize("series", [None, [], "x", {}, {"lastObservedTime": None}, {"lastObservedTime": 7}])
def test_doctor_event_of_any_series_is_read(series: Any) -> None:
    event = {"type": "Warning", "series": series, "involvedObject": {"name": "chat-decode-a"}}
    assert findings_of(healthy(events=[event])) == []


async def test_doctor_lists_what_it_may_not_read() -> None:
    denied = Forbidden("forbidden", 403)
    paths = [
        PODS,
        DEPLOYMENTS,
        EVENTS.path("team"),
        HORIZONTALPODAUTOSCALERS.path("team"),
        NODES.path(),
        fake_kube.LEASE,
    ]
    answers: dict[str, Any] = dict.fromkeys(paths, denied)
    answers[fake_kube.services("team", "chat")] = service()
    findings = await examine(fake_kube.FakeKube(answers), "team", "chat", "plimsoll-system", NOW_S)
    assert {one.level for one in findings} == {UNCHECKED}
    assert len(findings) == len(paths)
    assert "ask for permission to list deployments.apps in namespace team" in {one.remedy for one in findings}
    assert exit_status(findings) == 0
    answers[PODS] = BackendUnavailable("too slow")
    findings = await examine(fake_kube.FakeKube(answers), "team", "chat", "plimsoll-system", NOW_S)
    assert "cannot list pods: too slow" in {one.message for one in findings}


async def test_doctor_reads_a_cluster_without_autoscalers() -> None:
    answers = {
        fake_kube.services("team", "chat"): service(),
        fake_kube.LEASE: {"spec": {"holderIdentity": "o"}},
        fake_kube.explanation("o", "team", "chat"): {},
        fake_kube.SERVICES: {"items": []},
    }
    assert await examine(fake_kube.FakeKube(answers), "team", "chat", "plimsoll-system", NOW_S) == []
    with pytest.raises(ClusterQueryError, match="no InferenceService none in namespace team"):
        await examine(fake_kube.FakeKube(answers), "team", "none", "plimsoll-system", NOW_S)


def test_findings_print_problems_first_with_their_remedy() -> None:
    findings = [Finding(UNCHECKED, "nodes", "forbidden"), Finding(NOTE, "a", "b"), Finding(PROBLEM, "c", "d", "do e")]
    assert [" ".join(line.split()) for line in findings_lines(findings, Screen())] == [
        "problem c d -> do e",
        "note a b",
        "unchecked nodes forbidden",
    ]
    assert exit_status(findings) == 1


@pytest.mark.parametrize("reason", ["RecommendOnly", "ScalingOff", "Paused"])
def test_doctor_mode_that_the_user_chose_is_no_problem(reason: str) -> None:
    stated = {"type": "ScalingInactive", "status": "True", "reason": reason, "message": "so"}
    [(level, subject, _)] = findings_of(healthy(service=service(stated)))
    assert (level, subject) == (NOTE, "ScalingInactive")
