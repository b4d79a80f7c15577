"""`parse` takes what is right, refuses what is not, and names every field at fault."""

from __future__ import annotations

from typing import Any

import pytest

from plimsoll.api.v1alpha1 import InferenceService, InferenceServiceStatus, parse
from plimsoll.core.autoscaling.scaling_policy import ScalingMode
from plimsoll.core.errors import InvalidSpec
from tests.api.all_cases import ALL_CASES
from tests.api.cases import Case
from tests.api.manifests import ABSENT, Manifest, adopted, adopted_pair, aggregated, examples, service
from tests.api.mutations import mutations
from tests.api.statuses import STATUS
from tests.api.valid_manifests import VALID_ADOPTED, VALID_AGGREGATED, VALID_EDITS


def problems(manifest: Manifest) -> tuple[str, ...]:
    with pytest.raises(InvalidSpec) as caught:
        parse(manifest)
    return caught.value.problems


def test_parse_broken_rule_names_field_and_remedy() -> None:
    found = [(case, problems(case.manifest())) for case in ALL_CASES]
    assert [(case.name, said) for case, said in found if not _is_explained(case, said)] == []


def _is_explained(case: Case, said: list[str]) -> bool:
    return len(said) == 1 and said[0].startswith(f"{case.path}: ") and case.message in said[0]


@pytest.mark.parametrize("name", examples())
def test_parse_wrong_type_names_field(name: str) -> None:
    for broken in mutations(name, examples()[name]):
        assert any(problem.startswith(f"{broken.path}: ") for problem in problems(broken.manifest)), broken.path


@pytest.mark.parametrize("edits", VALID_EDITS, ids=str)
def test_parse_boundary_values_are_accepted(edits: Manifest) -> None:
    assert parse(service(**edits)).metadata.uid == ""


@pytest.mark.parametrize("edits", VALID_AGGREGATED, ids=lambda edits: str(edits)[:60])
def test_parse_aggregated_boundary_values_are_accepted(edits: Manifest) -> None:
    assert parse(aggregated(**edits)).metadata.uid == ""


@pytest.mark.parametrize("edits", VALID_ADOPTED, ids=str)
def test_parse_adopted_boundary_values_are_accepted(edits: Manifest) -> None:
    assert [role for role, _ in parse(adopted(**edits)).spec.sized_tiers.items()] == ["serve"]


@pytest.mark.parametrize("edits", [{"pod": {}}, {"rollout": {}}, {"image": "a"}, {"adapters": []}])
def test_parse_tier_field_of_target_is_unknown(edits: Manifest) -> None:
    (name,) = edits
    (problem,) = problems(adopted(**{f"spec.targets.serve.{name}": edits[name]}))
    assert problem == f"spec.targets.serve.{name}: is not a known field"


def test_targets_of_a_pair_are_tiers_without_requests() -> None:
    spec = parse(adopted_pair(**{"spec.targets.decode.metricsPort": 8200})).spec
    assert [role for role, _ in spec.sized_tiers.items()] == ["prefill", "decode"]
    assert (spec.takes_requests, spec.mode) == (False, ScalingMode.RECOMMEND)
    assert spec.targets is not None
    assert spec.targets.metrics_ports == "8000 (prefill) and 8200 (decode)"


@pytest.mark.parametrize("name", examples())
def test_parse_examples_are_accepted(name: str) -> None:
    assert isinstance(parse(examples()[name]), InferenceService)


def test_parse_names_the_reserved_flags_that_it_found() -> None:
    (problem,) = problems(service(**{"spec.engine.args": ["--port=1", "--seed", "4", "--kv_transfer_config.a=b"]}))
    assert problem.startswith("spec.engine.args: may not have a flag that Plimsoll sets (reserved: --host, --port, ")
    assert problem.endswith("): it has --port, --kv_transfer_config.a")


def test_parse_lists_all_problems_at_once() -> None:
    manifest = service(
        **{
            "metadata.name": "Chat",
            "spec.model.uri": "ftp://bucket/model",
            "spec.engine.args": ["--port=1", "--seed", "--host"],
            "spec.tiers.prefill.gpus": "one",
            "spec.tiers.decode.color": "blue",
        }
    )
    fields = [problem.split(": ")[0] for problem in problems(manifest)]
    assert sorted(fields) == [
        "metadata.name",
        "spec.engine.args",
        "spec.model.uri",
        "spec.tiers.decode.color",
        "spec.tiers.prefill.gpus",
    ]


def test_parse_error_shows_invalid_value() -> None:
    (problem,) = problems(service(**{"spec.slo.ttft": "fast"}))
    assert problem == ('spec.slo.ttft: "fast" must be a duration with a unit (us, ms, s, m, h), such as 500ms or 1.5s')


def test_parse_snake_case_field_is_unknown() -> None:
    (problem,) = problems(service(**{"spec.tiers.decode.min_replicas": 2}))
    assert problem == ("spec.tiers.decode.min_replicas: is not a known field; did you mean minReplicas or maxReplicas?")


@pytest.mark.parametrize(
    ("path", "value", "similar"),
    [
        ("spec.slo.tftt", "1s", "ttft"),
        ("spec.tiers.decode.replicas", 2, "minReplicas or maxReplicas"),
        ("spec.engine.env", [{"name": "A", "vaule": "b"}], "value"),
        ("spec.modle", {}, "model"),
    ],
)
def test_parse_unknown_field_names_similar_fields(path: str, value: object, similar: str) -> None:
    (problem,) = problems(service(**{path: value}))
    assert problem.endswith(f": is not a known field; did you mean {similar}?")


def test_parse_other_kind_or_api_version_is_rejected() -> None:
    assert "kind" in problems(service(kind="Service"))[0]
    assert "apiVersion" in problems(service(apiVersion="plimsoll.dev/v2"))[0]


def test_parse_missing_spec_is_rejected() -> None:
    assert problems(service(spec=ABSENT)) == ("spec: is required",)


def test_parse_status_of_other_version_is_ignored() -> None:
    status = {"conditions": [{"type": "Ready", "phase": "new"}], "modelNames": 3}
    assert parse({**service(), "status": status}).status.conditions == ()


def test_parse_status_ignores_unknown_fields() -> None:
    status = {"modelNames": ["chat"], "tiers": {"decode": {"summary": "1/1", "new": True}}, "later": {}}
    read = parse({**service(), "status": status}).status
    assert read.model_names == ("chat",)
    assert read.tiers is not None
    assert read.tiers.decode is not None
    assert read.tiers.decode.summary == "1/1"


@pytest.mark.parametrize(
    "unread",
    [
        {"slo": {"ttft": 0.4}},
        {"slo": "fine"},
        {"limitedBy": ["a", "b"]},
        {"recovery": 7},
        {"tiers": {"decode": {"summary": 7}}, "conditions": [{}]},
        {"observedGeneration": -1},
    ],
    ids=str,
)
def test_parse_readable_fields_survive_unreadable_status(unread: Manifest) -> None:
    status = parse({**service(), "status": {"url": "http://x", "modelNames": ["a"], **unread}}).status
    assert status == InferenceServiceStatus(url="http://x", model_names=("a",))


@pytest.mark.parametrize("status", [None, [], "fine", 7, {1: 2}, {"url": 7}])
def test_parse_invalid_status_is_empty(status: Any) -> None:
    assert parse({**service(), "status": status}).status == InferenceServiceStatus()


def test_parse_status_round_trips() -> None:
    assert parse({**service(), "status": STATUS.manifest()}).status == STATUS


def test_parse_ignores_other_metadata() -> None:
    metadata = {"name": "chat", "namespace": "a", "uid": "u", "managedFields": [{}], "resourceVersion": "7"}
    read = parse({**service(), "metadata": metadata})
    assert (read.key, read.metadata.uid) == ("a/chat", "u")


def test_parse_absent_fields_have_documented_defaults() -> None:
    read = parse(service())
    tiers = dict(read.spec.tiers.items())
    assert list(tiers) == ["prefill", "decode"]
    decode = tiers["decode"]
    assert decode.replica_bounds == (1, 1)
    assert (decode.gpus, decode.gpu_resource) == (1, None)
    assert (decode.rollout.max_surge, decode.rollout.max_unavailable) == (1, 0)
    assert read.model_name == "chat"
    assert read.spec.slo is None
    assert read.spec.model.cache_size == "64Gi"


def test_parse_tier_without_maximum_stays_at_minimum() -> None:
    tiers = parse(aggregated(**{"spec.tiers.serve.minReplicas": 3})).spec.tiers
    assert [tier.replica_bounds for _, tier in tiers.items()] == [(3, 3)]


@pytest.mark.parametrize(
    ("uri", "scheme", "location", "claim"),
    [
        ("hf://Qwen/Qwen3-8B", "hf", "Qwen/Qwen3-8B", None),
        ("pvc://models/a/b/", "pvc", "models/a/b", ("models", "a/b")),
        ("file:///opt/tiny/", "file", "/opt/tiny", None),
    ],
)
def test_parse_model_uri_is_split(uri: str, scheme: str, location: str, claim: tuple[str, str] | None) -> None:
    model = parse(service(**{"spec.model.uri": uri})).spec.model
    assert (model.scheme, model.location, model.claim) == (scheme, location, claim)


def test_parse_slo_durations_are_in_seconds() -> None:
    slo = parse(service(**{"spec.slo.ttft": "1m0.5s"})).spec.slo
    assert slo is not None
    assert (slo.percentile, slo.ttft_seconds, slo.tpot_seconds) == (95, 60.5, None)


def test_parse_e2e_target_round_trips_and_requires_text() -> None:
    slo = parse(service(**{"spec.slo": {"ttft": "500ms", "e2e": "1m0.5s"}})).spec.slo
    assert slo is not None
    assert (slo.e2e_seconds, slo.manifest()["e2e"]) == (60.5, "1m0.5s")
    assert problems(service(**{"spec.slo": {"ttft": "500ms", "e2E": "1m"}})) == (
        "spec.slo.e2E: is not a known field; did you mean e2e?",
    )
    assert problems(service(**{"spec.slo": {"ttft": "1s", "e2e": 20}})) == (
        "spec.slo.e2e: 20 must be a duration with a unit (us, ms, s, m, h), such as 500ms or 1.5s",
    )


def test_parse_itl_target_is_rejected_in_class_slo() -> None:
    slo = {"ttft": "500ms", "itl": "40ms"}
    read = parse(service(**{"spec.slo": slo}))
    assert read.spec.slo is not None
    assert read.spec.slo.itl_seconds == 0.04
    classes = [{"name": "chat", "slo": {"tpot": "50ms", "itl": "40ms"}}]
    assert problems(service(**{"spec.slo": slo, "spec.admission.classes": classes})) == (
        "spec.admission.classes[0].slo.itl: is not a known field",
    )


def test_manifest_of_pod_overrides_equals_input() -> None:
    written = {"name": "a", "configMap": {"name": "b", "items": [{"key": "c", "path": "d"}]}}
    pod = "spec.tiers.decode.pod"
    read = parse(service(**{f"{pod}.volumes": [written], f"{pod}.tolerations": [{"key": "x"}]}))
    decode = dict(read.spec.tiers.items())["decode"]
    assert decode.pod.volumes[0].manifest() == written
    assert decode.pod.tolerations[0].manifest() == {"key": "x", "operator": "Equal"}
