"""Which stored pod template a tier uses, and when it is rendered again."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from plimsoll.api import labels
from plimsoll.api.v1alpha1 import parse
from plimsoll.controllers.autoscale.scaling_status import initial_report
from plimsoll.controllers.gateway_poller import GatewayView
from plimsoll.controllers.object_cache import ObjectCache
from plimsoll.controllers.reconcile.object_plan import ObjectPlan, plan_objects
from plimsoll.controllers.reconcile.observe import ObservedService, observe
from plimsoll.controllers.reconcile.tuning_status import chunk_event
from plimsoll.resources import engine_tuning, lora, objects
from plimsoll.resources.engine_tuning import MeasuredChunk, stored_arguments
from plimsoll.resources.platform_config import EngineDefaults
from tests import builders

Object = dict[str, Any]

MODEL = {"uri": "file:///models/tiny"}


def planned(
    raw: Object,
    *children: Object,
    generation: int = 0,
    image: str = "",
    has_turn: bool = False,
    args: tuple[str, ...] | None = None,
    chunk: MeasuredChunk | None = None,
) -> ObjectPlan:
    """The plan for a service with these objects. generation, image, args: of the platform's settings of engines.

    chunk: what the scaling report asks for.
    """
    rollout = builders.PLATFORM.engine.rollout.model_copy(update={"generation": generation})
    changed: Object = {"rollout": rollout, **({"image": image} if image else {})}
    if args is not None:
        changed["defaults"] = EngineDefaults(args=args)
    engine = builders.PLATFORM.engine.model_copy(update=changed)
    store = ObjectCache()
    for obj in (raw, *children):
        store.put(obj)
    observed = observe(store, GatewayView(), ("team", "chat"))
    assert isinstance(observed, ObservedService)
    replicas = dict.fromkeys(("prefill", "decode", "serve"), 1)
    platform = builders.PLATFORM.model_copy(update={"engine": engine})
    report = None if chunk is None else replace(initial_report(None, 0.0), measured_chunk=chunk)
    return plan_objects(observed, parse(raw), replicas, platform, report, has_turn=has_turn)


def templates(found: ObjectPlan) -> dict[str, Object]:
    """The pod template of each Deployment."""
    return {obj["metadata"]["name"]: obj["spec"]["template"] for obj in found.desired if obj["kind"] == "Deployment"}


def stored(found: ObjectPlan) -> list[Object]:
    """The Deployments and ControllerRevisions of a plan, as the API server has them."""
    made = [*found.templates, *(one for one in found.desired if one["kind"] == "Deployment")]
    return [{**one, "metadata": {**one["metadata"], "uid": one["metadata"]["name"]}} for one in made]


def images(found: ObjectPlan) -> set[str]:
    return {template["spec"]["containers"][0]["image"] for template in templates(found).values()}


def generations(found: ObjectPlan) -> set[str | None]:
    """The generation that the Deployments say."""
    made = [one for one in found.desired if one["kind"] == "Deployment"]
    return {one["metadata"]["labels"].get(labels.TEMPLATE_GENERATION) for one in made}


def is_rolled_out(found: ObjectPlan) -> bool:
    marks = {labels.ROLLED_OUT in one["metadata"]["labels"] for one in found.templates}
    assert len(marks) == 1
    return marks.pop()


def tunable(**changes: Object) -> Object:
    """A service whose model and GPU type are known, with an ITL target."""
    pod = {"nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-H200"}}
    slo = {"ttft": "500ms", "tpot": "30ms", "itl": "40ms"}
    model = {"uri": "hf://meta-llama/Llama-3.1-8B"}
    return builders.service(**{"model": model, "tiers": {"serve": {"pod": pod}}, "slo": slo, **changes})


def tuned_flags(found: ObjectPlan) -> dict[str, list[str]]:
    """The arguments that the operator has chosen, by Deployment."""
    return {name: [one.flag for one in stored_arguments(template)] for name, template in templates(found).items()}


def service_named(name: str) -> Object:
    return builders.service(model={**MODEL, "name": name})


def test_plan_new_model_name_keeps_template() -> None:
    before = planned(service_named("old"))
    after = planned(service_named("new"), *before.templates)
    assert after.templates == ()
    assert after.revisions == before.revisions
    assert templates(after) == templates(before)


def test_plan_upgrade_to_tuning_keeps_templates_until_asked() -> None:
    """A stored template without tuned arguments, as an operator without tuning has left it."""
    untuned = planned(tunable(), args=("--max-num-batched-tokens", "8192"))
    after = planned(tunable(), *stored(untuned))
    assert (after.templates, templates(after)) == ((), templates(untuned))
    assert not any(tuned_flags(after).values())
    requested = planned(tunable(engine={"tuning": "Auto"}), *stored(untuned))
    assert tuned_flags(requested) == {"chat-serve": ["--max-num-batched-tokens"]}
    rolled = planned(tunable(), *stored(untuned), generation=1, image="example.com/engine:2", has_turn=True)
    assert tuned_flags(rolled) == {"chat-serve": ["--max-num-batched-tokens"]}


def test_plan_tuned_template_survives_slo_change_and_upgrade() -> None:
    before = planned(tunable())
    for itl in ("41ms", "150ms", "3s"):
        after = planned(tunable(slo={"ttft": "500ms", "itl": itl}), *stored(before))
        assert (after.templates, templates(after)) == ((), templates(before))
    other_chart = planned(tunable(), *stored(before), args=("--max-num-batched-tokens", "8192"))
    assert (other_chart.templates, templates(other_chart)) == ((), templates(before))
    off = planned(tunable(engine={"tuning": "Off"}), *stored(before))
    assert tuned_flags(off) == {"chat-serve": []}
    assert planned(tunable(), *stored(off)).revisions == before.revisions


def test_plan_tuning_that_sets_nothing_restarts_nothing() -> None:
    raw = builders.service(tiers={"serve": {}}, slo={"ttft": "1s"})
    before = planned(raw)
    for tuning in ("Auto", "Off"):
        requested = builders.service(tiers={"serve": {}}, slo={"ttft": "1s"}, engine={"tuning": tuning})
        assert templates(planned(requested, *stored(before))) == templates(before)


def test_plan_earlier_revision_keeps_its_template() -> None:
    raw = service_named("old")
    earlier = []
    for kept in planned(raw).templates:
        kind = kept["metadata"]["labels"]["plimsoll.dev/role"]
        name = objects.earlier_revision_name(parse(raw), kind)
        earlier.append({**kept, "metadata": {**kept["metadata"], "name": name}, "data": {"rendered": "before"}})
    first = planned(raw, *earlier)
    assert set(map(json.dumps, templates(first).values())) == {'{"rendered": "before"}'}
    renamed = planned(service_named("new"), *first.templates)
    assert (renamed.templates, templates(renamed)) == ((), templates(first))


def test_plan_keeps_config_map_that_a_pod_mounts() -> None:
    """A pod of the old template that is created during the rollout needs it."""
    raw = builders.service(tiers={"serve": {}})
    adapted = {**raw, "spec": {**raw["spec"], "adapters": [{"name": "sql", "uri": "hf://acme/sql"}]}}
    config_map = lora.config_map(parse(adapted), adapted)
    config_map["metadata"] |= {"uid": "uid-adapters", "resourceVersion": "7"}
    pod = builders.pod(raw, "serve") | {"spec": {"volumes": lora.volumes(parse(adapted))}}
    assert planned(raw, config_map, pod).prune == ()
    assert planned(raw, config_map, builders.pod(raw, "serve")).prune == (config_map,)


OLD, NEW = "example.com/engine:1", "example.com/engine:2"


def test_plan_new_image_alone_keeps_templates_and_objects() -> None:
    before = planned(service_named("chat"))
    after = planned(service_named("chat"), *stored(before), image=NEW, has_turn=True)
    assert (after.templates, after.desired) == ((), before.desired)
    assert generations(before) == {None}
    assert not any(labels.ROLLED_OUT in one["metadata"]["labels"] for one in before.templates)


def test_plan_new_generation_waits_for_the_turn() -> None:
    before = planned(service_named("chat"))
    after = planned(service_named("chat"), *stored(before), image=NEW, generation=1)
    assert (after.templates, after.desired, after.revisions) == ((), before.desired, before.revisions)


def test_plan_turn_renders_all_tiers_at_the_generation() -> None:
    before = stored(planned(service_named("chat")))
    turn = planned(service_named("chat"), *before, image=NEW, generation=1, has_turn=True)
    assert (len(turn.templates), images(turn), generations(turn), is_rolled_out(turn)) == (2, {NEW}, {"1"}, True)
    later = planned(service_named("chat"), *before, *stored(turn), image=NEW, generation=1)
    assert (later.templates, later.desired) == ((), turn.desired)


def test_plan_goes_on_after_a_crash_between_two_tiers() -> None:
    before = stored(planned(service_named("chat")))
    turn = planned(service_named("chat"), *before, image=NEW, generation=1, has_turn=True)
    later = planned(service_named("chat"), *before, stored(turn)[0], image=NEW, generation=1)
    assert (len(later.templates), is_rolled_out(later), later.desired) == (1, True, turn.desired)


def test_plan_equal_templates_take_the_generation_at_once() -> None:
    before = planned(service_named("chat"))
    after = planned(service_named("chat"), *stored(before), generation=1)
    assert (templates(after), generations(after), is_rolled_out(after)) == (templates(before), {"1"}, False)


def test_plan_changed_spec_takes_all_tiers_to_the_generation() -> None:
    before = planned(service_named("chat"))
    tiers = {"prefill": {"minReplicas": 1}, "decode": {"minReplicas": 1, "pod": {"nodeSelector": {"a": "b"}}}}
    after = planned(builders.service(model=MODEL, tiers=tiers), *stored(before), image=NEW, generation=1)
    assert (images(after), generations(after), is_rolled_out(after)) == ({NEW}, {"1"}, False)


def test_plan_former_generation_returns_to_its_stored_templates() -> None:
    """A rollout that is not over is undone at once: the pods of the former templates still run."""
    before = planned(service_named("chat"))
    turn = planned(service_named("chat"), *stored(before), image=NEW, generation=1, has_turn=True)
    children = {one["metadata"]["name"]: one for one in (*stored(before), *stored(turn))}
    back = planned(service_named("chat"), *children.values(), image="example.com/engine:3")
    assert (back.templates, back.desired) == ((), before.desired)


def test_plan_third_generation_keeps_templates_in_use() -> None:
    before = planned(service_named("chat"))
    turn = planned(service_named("chat"), *stored(before), image=NEW, generation=1, has_turn=True)
    children = {one["metadata"]["name"]: one for one in (*stored(before), *stored(turn))}
    waiting = planned(service_named("chat"), *children.values(), image="example.com/engine:3", generation=2)
    assert (waiting.templates, waiting.desired) == ((), turn.desired)
    del children["chat-decode"], children["chat-prefill"]
    children |= {one["metadata"]["name"]: one for one in stored(before)}
    undone = planned(service_named("chat"), *children.values(), image="example.com/engine:3", generation=2)
    assert (undone.templates, images(undone)) == ((), {OLD})


# ---------------------------------------------------------------- a chunk from measurements

FLAG = "--max-num-batched-tokens"


def measured(raw: Object, tokens: int) -> MeasuredChunk:
    return MeasuredChunk(objects.revision_name(parse(raw), "serve"), tokens, "measured steps say so", 1.0)


def arguments(found: ObjectPlan) -> Object:
    """What new engines get, by flag."""
    (template,) = templates(found).values()
    environment = {one["name"]: one.get("value") for one in template["spec"]["containers"][0]["env"]}
    words = json.loads(environment["PLIMSOLL_DEFAULT_ARGS"])
    return {words[at]: words[at + 1] for at in range(0, len(words) - 1, 2)}


def auto(**engine: Any) -> Object:
    return tunable(engine={"tuning": "Auto", **engine})


def test_measured_chunk_changes_only_that_argument() -> None:
    raw = auto(args=["--seed=1"])
    first = planned(raw)
    second = planned(raw, *stored(first), chunk=measured(raw, 2048), image="registry.example/other:2")
    (before,), (after,) = templates(first).values(), templates(second).values()
    assert (arguments(first)[FLAG], arguments(second)[FLAG]) == ("1024", "2048")
    (row,) = stored_arguments(after)
    assert (row.value, row.text, row.reason) == (2048, f"{FLAG}=2048 (measured)", "measured steps say so")
    assert images(second) == images(first)
    assert engine_tuning.with_chunk(after, 0, "") == before


def test_measured_chunk_survives_a_lost_report() -> None:
    raw = auto()
    changed = stored(planned(raw, *stored(planned(raw)), chunk=measured(raw, 2048)))
    for wanted in (None, measured(raw, 2048), MeasuredChunk("of-another-spec", 4096, "")):
        again = planned(raw, *changed, chunk=wanted)
        assert (again.templates, arguments(again)[FLAG]) == ((), "2048")


def test_undone_chunk_has_the_former_template() -> None:
    raw = auto()
    first = planned(raw)
    changed = stored(planned(raw, *stored(first), chunk=measured(raw, 2048)))
    undone = planned(raw, *changed, chunk=measured(raw, 0))
    assert templates(undone) == templates(first)
    assert undone.revisions == first.revisions
    workload = next(one for one in undone.desired if one["kind"] == "Deployment")
    assert labels.MEASURED_CHUNK not in workload["metadata"]["labels"]
    assert templates(planned(raw, *stored(first), *stored(undone)[:1])) == templates(first)


def test_platform_rollout_keeps_the_measured_chunk() -> None:
    raw = auto()
    changed = stored(planned(raw, *stored(planned(raw)), chunk=measured(raw, 2048)))
    waiting = planned(raw, *changed, generation=1, image="registry.example/other:2")
    rolled = planned(raw, *changed, generation=1, image="registry.example/other:2", has_turn=True)
    assert (waiting.templates, arguments(waiting)[FLAG]) == ((), "2048")
    assert (arguments(rolled)[FLAG], images(rolled)) == ("2048", {"registry.example/other:2"})
    assert generations(rolled) == {"1"}
    after = planned(raw, *stored(rolled), generation=1, image="registry.example/other:2")
    assert (after.templates, arguments(after)[FLAG]) == ((), "2048")


def test_measured_chunk_keeps_the_mark_of_a_rollout() -> None:
    """A failure after it still stops the platform's rollout."""
    raw = auto()
    rolled = planned(raw, *stored(planned(raw)), generation=1, image="registry.example/other:2", has_turn=True)
    changed = planned(raw, *stored(rolled), generation=1, chunk=measured(raw, 2048))
    undone = planned(raw, *stored(changed), generation=1, chunk=measured(raw, 0))
    assert [is_rolled_out(one) for one in (rolled, changed, undone)] == [True, True, True]


@pytest.mark.parametrize(
    ("args", "chunk"), [((FLAG, "4096"), "4096"), (("--no-enable-chunked-prefill", "--seed=1"), None)]
)
def test_new_argument_of_the_chart_ends_the_chunk(args: tuple[str, ...], chunk: str | None) -> None:
    """It arrives with the platform's rollout, and overrides what was measured."""
    raw = auto()
    changed = stored(planned(raw, *stored(planned(raw)), chunk=measured(raw, 2048)))
    rolled = planned(raw, *changed, generation=1, args=args, has_turn=True)
    assert arguments(rolled).get(FLAG) == chunk
    after = planned(raw, *stored(rolled), generation=1, args=args)
    assert (after.templates, arguments(after).get(FLAG)) == ((), chunk)


def test_new_spec_has_no_measured_chunk() -> None:
    raw = auto()
    changed = stored(planned(raw, *stored(planned(raw)), chunk=measured(raw, 2048)))
    for engine, value in (({"args": ["--seed=1"]}, "1024"), ({"tuning": "Off"}, None)):
        found = planned(auto(**engine), *changed, chunk=measured(raw, 2048))
        assert arguments(found).get(FLAG) == value


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (auto(), True),
        (tunable(), False),
        (auto(tuning="Off"), False),
        (auto(args=[f"{FLAG}=4096"]), False),
        (auto(args=["--no-enable-chunked-prefill"]), False),
    ],
)
def test_chunk_is_measured_only_where_user_left_it(raw: Object, expected: bool) -> None:
    (template,) = templates(planned(raw)).values()
    assert engine_tuning.may_be_measured(parse(raw), template) is expected


def test_chart_argument_keeps_the_chunk() -> None:
    raw = auto()
    (template,) = templates(planned(raw, args=(FLAG, "4096"))).values()
    assert not engine_tuning.may_be_measured(parse(raw), template)


def test_event_of_measured_chunk_has_its_reason() -> None:
    raw = auto()
    live = {("Deployment", one["metadata"]["name"]): one for one in stored(planned(raw)) if one["kind"] == "Deployment"}
    wanted = measured(raw, 2048)
    changed = planned(raw, *stored(planned(raw)), chunk=wanted)
    event = chunk_event(live, changed.desired, wanted)
    assert event is not None
    assert event.message == f"serve: new engines get {FLAG}=2048 (measured): measured steps say so"
    assert chunk_event(live, planned(raw).desired, wanted) is None
    assert chunk_event(live, changed.desired, None) is None
