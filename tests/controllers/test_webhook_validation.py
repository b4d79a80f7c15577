"""What the admission webhook refuses, what it warns of, and what it leaves alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from plimsoll.api.conditions import ConditionType
from plimsoll.controllers.object_cache import ObjectCache
from plimsoll.controllers.reconcile.observe import NameState, name_state
from plimsoll.controllers.reconcile.service_status import StatusInputs, build_conditions
from plimsoll.controllers.webhook.service_index import essentials
from plimsoll.controllers.webhook.validation import Cluster, ValidationResult, validate_change
from plimsoll.core.routing.model_names import NameRules, read_claim
from tests import builders

Object = dict[str, Any]

SINCE = "2026-02-01T10:00:00.000001Z"
LATER = "2026-03-01T00:00:00Z"


def with_claim(service: Object, granted: str) -> Object:
    return service | {"status": {"nameClaim": f"{granted} since {SINCE}", "modelNames": [granted]}}


def service_named(model: str | None, name: str = "chat", namespace: str = "team", **spec: Any) -> Object:
    model_spec = {"uri": "file:///models/tiny"} | ({} if model is None else {"name": model})
    return builders.service(name, namespace, model=model_spec, **spec)


def falling_back(name: str, to: str | None, **spec: Any) -> Object:
    fallback = {} if to is None else {"admission": {"whenFull": "Downgrade", "fallback": {"name": to}}}
    return builders.service(name, slo={"ttft": "500ms", "tpot": "50ms"}, **fallback, **spec)


def cluster_of(*services: Object, rules: NameRules | None = None) -> Cluster:
    """As the webhook keeps the services: their essentials only."""
    cache = ObjectCache()
    for service in services:
        cache.put(essentials(service))
    return Cluster(cache, rules or NameRules())


def created_later(service: Object) -> Object:
    service["metadata"]["creationTimestamp"] = LATER
    return service


HOLDER = with_claim(service_named("playground", "first", "other"), "playground")


def test_claimed_model_name_is_refused_with_holder_and_time() -> None:
    found = validate_change(created_later(service_named("playground")), None, cluster_of(HOLDER))
    assert found == ValidationResult(
        errors=(
            "spec.model.name playground: service other/first holds the name since 2026-02-01T10:00:00Z; change"
            " spec.model.name",
        )
    )


def test_claim_of_earlier_service_is_refused() -> None:
    [error] = validate_change(
        created_later(service_named("playground")), None, cluster_of(service_named("playground", "first", "other"))
    ).errors
    assert "service other/first claims the name too and was created first (2026-01-01T00:00:00Z)" in error


def test_qualified_name_of_another_service_is_refused() -> None:
    [error] = validate_change(
        service_named("other/first"), None, cluster_of(service_named(None, "first", "other"))
    ).errors
    assert "the name is the NAMESPACE/NAME of service other/first" in error


@pytest.mark.parametrize(
    ("services", "new"),
    [
        ((), service_named("playground")),
        ((HOLDER,), service_named("another")),
        ((HOLDER,), HOLDER),
        ((with_claim(HOLDER, "playground") | {"metadata": HOLDER["metadata"] | {"deletionTimestamp": LATER}},), None),
    ],
)
def test_free_model_name_is_allowed(services: tuple[Object, ...], new: Object | None) -> None:
    assert validate_change(new or service_named("playground"), None, cluster_of(*services)) == ValidationResult()


def test_name_that_its_holder_gives_up_is_a_warning() -> None:
    """Two services may trade names in one apply."""
    renamed = with_claim(service_named("renamed", "first", "other"), "playground")
    found = validate_change(created_later(service_named("playground")), None, cluster_of(renamed))
    assert not found.errors
    assert "service other/first holds the name since" in found.warnings[0]


def test_claimed_object_name_is_a_warning() -> None:
    """Without spec.model.name the service still serves as NAMESPACE/NAME."""
    holder = with_claim(service_named("chat", "first", "other"), "chat")
    found = validate_change(created_later(service_named(None, "chat")), None, cluster_of(holder))
    assert not found.errors
    assert "service other/first holds the name" in found.warnings[0]
    assert "clients reach this service as team/chat" in found.warnings[0]


@pytest.mark.parametrize(
    ("rules", "model", "words"),
    [
        (NameRules(frozenset({"other"})), "playground", "may not claim short model names"),
        (NameRules(frozenset(), frozenset({"bank"})), "bank/llm", "belong to namespace bank"),
    ],
)
def test_name_that_the_rules_refuse_is_a_warning(rules: NameRules, model: str, words: str) -> None:
    found = validate_change(service_named(model), None, cluster_of(rules=rules))
    assert not found.errors
    assert words in found.warnings[0]


def test_update_without_new_name_is_not_refused() -> None:
    loser = created_later(service_named("playground"))
    changed = copy.deepcopy(loser)
    changed["spec"]["scaling"] = {"mode": "Off"}
    assert validate_change(changed, loser, cluster_of(HOLDER, loser)) == ValidationResult()


def test_update_to_a_claimed_name_is_refused() -> None:
    own = with_claim(created_later(service_named("own")), "own")
    changed = copy.deepcopy(own)
    changed["spec"]["model"]["name"] = "playground"
    assert "other/first" in validate_change(changed, own, cluster_of(HOLDER, own)).errors[0]


def test_warning_has_the_words_of_the_condition() -> None:
    service = created_later(service_named(None, "chat"))
    holder = with_claim(service_named("chat", "first", "other"), "chat")
    claims = [claim for one in (service, holder) if (claim := read_claim(one)) is not None]
    state: NameState = name_state(claims[0], claims, NameRules())
    conditions = build_conditions(StatusInputs(service, name_state=state))
    condition = next(one for one in conditions if one.type is ConditionType.MODEL_NAME_REJECTED)
    [warning] = validate_change(service, None, cluster_of(holder)).warnings
    assert warning.partition(";")[0] == condition.message.partition(";")[0]


def test_missing_fallback_is_a_warning() -> None:
    found = validate_change(falling_back("chat", "spare"), None, cluster_of())
    assert found == ValidationResult(
        warnings=("spec.admission.fallback.name: team/spare does not exist; requests meant for it are rejected",)
    )
    assert (
        validate_change(falling_back("chat", "spare"), None, cluster_of(falling_back("spare", None)))
        == ValidationResult()
    )


def test_circle_of_fallbacks_is_refused_and_named() -> None:
    others = (falling_back("b", "c"), falling_back("c", "a"))
    [error] = validate_change(falling_back("a", "b"), None, cluster_of(*others)).errors
    assert "(cycle: team/a -> team/b -> team/c -> team/a)" in error


def test_circle_of_others_is_no_error() -> None:
    others = (falling_back("b", "c"), falling_back("c", "b"))
    assert validate_change(falling_back("a", "b"), None, cluster_of(*others)) == ValidationResult()


def test_update_that_keeps_its_fallback_is_not_refused() -> None:
    old = falling_back("a", "b")
    new = falling_back("a", "b", scaling={"mode": "Off"})
    assert validate_change(new, old, cluster_of(old, falling_back("b", "a"))) == ValidationResult()


def test_slo_below_the_data_sheet_is_a_warning_once() -> None:
    tier = {"serve": {"pod": {"nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-H200"}}}}
    service = builders.service(model={"uri": "hf://Qwen/Qwen3-32B"}, tiers=tier, slo={"tpot": "5ms"})
    found = validate_change(service, None, cluster_of())
    assert not found.errors
    assert found.warnings[0].startswith("spec.slo.tpot: tier serve cannot meet 5 ms")
    changed = copy.deepcopy(service)
    changed["spec"]["scaling"] = {"mode": "Off"}
    assert validate_change(changed, service, cluster_of()) == ValidationResult()
    assert validate_change(service, None, cluster_of(), ("--quantization=fp8",)) == ValidationResult()


@pytest.mark.parametrize(
    ("gpus", "args", "chart_args", "said"),
    [
        (8, ["--tensor-parallel-size", "4"], (), "gpus is 8, of which --tensor-parallel-size 4 uses 4"),
        (1, ["--enable_expert_parallel"], (), "gpus is 1, on which --enable-expert-parallel has no effect"),
        (2, [], ("-tp", "4"), "gpus is 2, and --tensor-parallel-size 4 needs 4"),
        (8, ["-tp=4"], ("-dp", "4"), "gpus is 8, and --tensor-parallel-size 4 x --data-parallel-size 4 needs 16"),
    ],
)
def test_gpus_that_no_argument_uses_are_a_warning(
    gpus: int, args: list[str], chart_args: tuple[str, ...], said: str
) -> None:
    service = builders.service(tiers={"serve": {"gpus": gpus}}, engine={"args": args})
    found = validate_change(service, None, cluster_of(), chart_args)
    assert found == ValidationResult(warnings=(f"spec.tiers.serve.{said}; change it, or spec.engine.args",))


def test_devices_of_another_resource_are_not_judged() -> None:
    """A Neuron device has several cores, each of which is a rank."""
    tier = {"gpus": 2, "gpuResource": "aws.amazon.com/neuron"}
    service = builders.service(tiers={"serve": tier}, engine={"args": ["-tp", "4"]})
    assert validate_change(service, None, cluster_of(), ("-dp", "3")) == ValidationResult()
    default = builders.service(tiers={"serve": {"gpus": 2}}, engine={"args": ["-tp", "4"]})
    assert validate_change(default, None, cluster_of(), ("-dp", "3"), tier["gpuResource"]) == ValidationResult()
    [error] = validate_change(default, None, cluster_of()).errors
    assert "gpus is 2, and --tensor-parallel-size 4 needs 4" in error


def test_invalid_spec_is_refused_with_the_words_of_stalled() -> None:
    """A cluster may have the definition of an earlier release, without the rule."""
    service = builders.service(tiers={"serve": {"minReplicas": 3, "maxReplicas": 2}}, slo={"tpot": "50"})
    found = validate_change(service, None, None)
    conditions = build_conditions(StatusInputs(service, spec_problems=found.errors))
    stalled = next(one for one in conditions if one.type is ConditionType.STALLED)
    assert len(found.errors) == 2
    assert stalled.message == "; ".join(found.errors)


def test_known_problem_of_an_invalid_spec_allows_an_update() -> None:
    old = builders.service(tiers={"serve": {"minReplicas": 3, "maxReplicas": 2}})
    new = copy.deepcopy(old)
    new["spec"]["scaling"] = {"mode": "Off"}
    assert not validate_change(new, old, None).errors
    assert "maxReplicas" in validate_change(new, old, None).warnings[0]
    new["spec"]["scaling"] = {"mode": "On"}
    [error] = validate_change(new, old, None).errors
    assert error.startswith("spec.scaling.mode")


def test_deletion_and_unchanged_spec_are_left_alone() -> None:
    invalid = builders.service(tiers={})
    going = invalid | {"metadata": invalid["metadata"] | {"deletionTimestamp": LATER, "finalizers": []}}
    relabelled = invalid | {"metadata": invalid["metadata"] | {"labels": {"a": "b"}}}
    assert validate_change(going, builders.service(), cluster_of()) == ValidationResult()
    assert validate_change(relabelled, invalid, cluster_of()) == ValidationResult()


def test_unknown_cluster_leaves_out_rules_about_others() -> None:
    assert validate_change(falling_back("chat", "spare"), None, None) == ValidationResult()
    assert validate_change(created_later(service_named("playground")), None, None) == ValidationResult()


def with_adapter(name: str, adapter: str, namespace: str = "team") -> Object:
    made = builders.service(name, namespace, tiers={"serve": {}})
    made["spec"]["adapters"] = [{"name": adapter, "uri": "hf://acme/x"}]
    return made


def test_claimed_adapter_name_is_refused_once() -> None:
    new = created_later(with_adapter("chat", "playground"))
    [error] = validate_change(new, None, cluster_of(HOLDER)).errors
    assert "spec.adapters playground: service other/first holds the name since 2026-02-01T10:00:00Z" in error
    changed = with_adapter("chat", "playground")
    changed["spec"]["scaling"] = {"paused": True}
    assert validate_change(changed, new, cluster_of(HOLDER)) == ValidationResult()


def test_model_name_of_an_adapter_is_refused() -> None:
    owner = with_adapter("first", "playground", "other")
    owner["status"] = {"adapters": [{"name": "playground", "since": SINCE}]}
    [error] = validate_change(created_later(service_named("playground")), None, cluster_of(owner)).errors
    assert "adapter playground of service other/first holds the name since" in error
