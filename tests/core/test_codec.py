"""The codec: every stored record survives a round trip, and hostile documents are rejected with ValueError alone."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import fields
from typing import Annotated, Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plimsoll.core import codec
from plimsoll.core.admission.cost_model import EngineCostModel
from plimsoll.core.admission.publication import AdmissionLimits
from plimsoll.core.autoscaling.decision_state import (
    DecisionState,
    DownscaleRegret,
    TierDecisionState,
    TimedReplicas,
)
from plimsoll.core.autoscaling.startup_models import StartupModels, Variant, decode_models
from plimsoll.core.autoscaling.startup_time import Backoff, PhaseEstimate, StartupModel, from_medians
from plimsoll.core.codec import Length, Number
from plimsoll.core.demand import serialization as demand
from plimsoll.core.demand.demand_state import DemandState, observe
from plimsoll.core.demand.idle_periods import IDLE_LENGTHS_S, IdleStats
from plimsoll.core.engine_model.calibration import serialization as calibration
from plimsoll.core.engine_model.calibration.posterior_model import initial_posterior
from plimsoll.core.engine_model.step_time import StepModel

PRIOR_MODEL = from_medians({"pull": 30.0, "load": 20.0})
PRIOR, FLOOR = StepModel(0.015, 0.001, 5e-5, 1e-9, 2e-5, 4e-8), StepModel(0.01, 0.0, 1e-5, 0.0, 1e-6, 1e-9)
KEY = calibration.EngineKey("model", "gpu", "tp1", "vllm 0.26.0")


def numbers(low: float = -1e6, high: float = 1e6) -> st.SearchStrategy[float]:
    return st.floats(low, high)


NAMES, COUNTS = st.text(max_size=8), st.integers(0, 10_000)
MARKS = st.lists(st.builds(TimedReplicas, COUNTS, numbers()), max_size=4).map(tuple)
PHASES = st.builds(
    lambda prior_s, startups, mean, share: PhaseEstimate(prior_s, startups, mean, share * startups),
    numbers(0.1, 1e6), numbers(0.0, 20.0), numbers(-20.0, 20.0), numbers(0.0, 1.0),
)  # fmt: skip
PHASE_LISTS = st.dictionaries(NAMES, PHASES, min_size=1, max_size=12).map(lambda rows: tuple(rows.items()))
STARTUP_MODELS = st.builds(
    lambda phases, total, restart: StartupModel(phases, total, *restart),
    PHASE_LISTS, PHASES, st.just(((), None)) | st.tuples(PHASE_LISTS, PHASES),
)  # fmt: skip
VARIANTS = st.builds(Variant, NAMES, NAMES, NAMES)
REGRETS = st.builds(
    lambda idle, served, trials, share: DownscaleRegret(idle, served, trials, trials * share),
    MARKS, COUNTS, numbers(0.0), numbers(0.0, 1.0),
)  # fmt: skip
TIERS = st.builds(
    TierDecisionState, MARKS, MARKS, numbers(0.6, 2.0), st.builds(Backoff, COUNTS, numbers()), COUNTS,
    st.none() | COUNTS, st.none() | numbers(), REGRETS, COUNTS,
)  # fmt: skip
LENGTHS = st.lists(
    st.tuples(numbers(0.0), numbers(0.0, 1.0)), min_size=len(IDLE_LENGTHS_S), max_size=len(IDLE_LENGTHS_S)
)
UNBOUNDED = numbers() | st.just(math.inf)
COST_MODELS = st.builds(
    EngineCostModel,
    **{name: st.integers(1, 10**6) for name in ("batch", "max_sequences", "kv_tokens")},
    **{field.name: numbers(1e-6) for field in fields(EngineCostModel) if field.type == "Rounded"},
    block_tokens=COUNTS,
    token_budget=COUNTS,
    step_budget_s=st.tuples(UNBOUNDED, UNBOUNDED),
    tpot_s=st.tuples(UNBOUNDED, UNBOUNDED),
    max_spread_s=UNBOUNDED,
    kv_transfer_token_s=st.none() | numbers(),
    output_quantiles=st.lists(numbers(0.0), max_size=4).map(lambda tokens: tuple(sorted(tokens))),
)
RECORDS: dict[str, st.SearchStrategy[Any]] = {
    "start-up model": STARTUP_MODELS,
    "scaling state": st.builds(DecisionState, st.none() | numbers(), st.dictionaries(NAMES, TIERS, max_size=2)),
    "idle statistics": st.builds(
        lambda rows, bursts, requests: IdleStats(
            tuple(n for n, _ in rows), tuple(n * share for n, share in rows), bursts=bursts, requests=requests
        ),
        LENGTHS, numbers(0.0), numbers(0.0),
    ),
    "engine key": st.builds(calibration.EngineKey, NAMES, NAMES, NAMES, NAMES),
    "step model": st.builds(StepModel, numbers(0.01, 1.0), *[numbers(0.0, 1.0)] * 5),
    "admission limits": st.builds(
        AdmissionLimits, st.just(("high", "low")), st.none() | COST_MODELS, st.none() | numbers(), numbers(),
        st.booleans(), st.dictionaries(NAMES, COUNTS, max_size=3),
        st.lists(st.tuples(numbers(), numbers()), max_size=3).map(tuple),
        st.dictionaries(NAMES, numbers(0.01, 100.0), max_size=3), st.none() | numbers(),
    ),
}  # fmt: skip


def through_json(document: Any) -> Any:
    return json.loads(json.dumps(document, allow_nan=False))


@pytest.mark.parametrize("name", RECORDS)
@settings(max_examples=40)
@given(data=st.data())
def test_codec_any_record_round_trips(name: str, data: st.DataObject) -> None:
    record = data.draw(RECORDS[name])
    stored = through_json(codec.encode(record))
    read = codec.decode(type(record), stored)
    assert type(read) is type(record)
    assert codec.encode(read) == stored


@settings(max_examples=40)
@given(st.dictionaries(VARIANTS, STARTUP_MODELS, max_size=4), VARIANTS)
def test_codec_startup_models_round_trip(models: dict[Variant, StartupModel], current: Variant) -> None:
    stored = through_json(codec.encode(StartupModels(PRIOR_MODEL, tuple(models.items()), current)))
    read = decode_models(stored, PRIOR_MODEL)
    assert [name for name, _ in read.by_variant] == [*models]
    assert (read.current, codec.encode(read)) == (current, stored)


def demand_state() -> DemandState:
    state = DemandState()
    for minute in range(100):
        state = observe(state, 60.0 * minute, 3.0 + minute % 7)
    return state


DOCUMENTS: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "start-up models": (
        lambda stored: decode_models(stored, PRIOR_MODEL),
        codec.encode(StartupModels(PRIOR_MODEL, ((Variant("m"), PRIOR_MODEL),), Variant("m"))),
    ),
    "scaling state": (
        lambda stored: codec.decode(DecisionState, stored),
        codec.encode(DecisionState(1.0, {"serve": TierDecisionState((TimedReplicas(2, 1.0),), ready=1)})),
    ),
    "idle statistics": (lambda stored: codec.decode(IdleStats, stored), codec.encode(IdleStats())),
    "admission limits": (
        lambda stored: codec.decode(AdmissionLimits, stored),
        codec.encode(AdmissionLimits(("high",), ready_at_s=1.8e9, shares={"a": 1}, token_ratios={"image": 0.5})),
    ),
    "demand": (demand.from_dict, demand.to_dict(demand_state())),
    "calibration": (
        lambda stored: calibration.from_dict(stored, KEY, PRIOR, FLOOR),
        calibration.to_dict(initial_posterior(PRIOR, FLOOR), KEY),
    ),
}
HOSTILE = [
    None,
    True,
    -1,
    0,
    1.5,
    10**400,
    math.nan,
    math.inf,
    1e308,
    "",
    "x" * 5000,
    "infinite",
    [],
    [[]],
    {},
    {"": 0},
]


def paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if isinstance(value, dict):
        return [path, *(found for key in value for found in paths(value[key], (*path, key)))]
    if isinstance(value, list):
        return [path, *(found for place in range(len(value)) for found in paths(value[place], (*path, place)))]
    return [path]


@pytest.mark.parametrize("name", DOCUMENTS)
@settings(max_examples=150)
@given(data=st.data())
def test_codec_hostile_document_raises_value_error_only(name: str, data: st.DataObject) -> None:
    decode, good = DOCUMENTS[name]
    decode(good)
    path = data.draw(st.sampled_from(paths(good)))
    stored: Any = through_json({"root": good})
    at, last = stored, ("root", *path)
    for step in last[:-1]:
        at = at[step]
    if data.draw(st.booleans()):
        del at[last[-1]]
    else:
        at[last[-1]] = data.draw(st.sampled_from(HOSTILE))
    try:
        decode(stored.get("root"))
    except ValueError:
        return


@pytest.mark.parametrize("name", DOCUMENTS)
@pytest.mark.parametrize("foreign", [None, 7, "text", [], {}, {"version": 99}, {"version": 1}])
def test_codec_foreign_document_raises(name: str, foreign: Any) -> None:
    with pytest.raises(ValueError, match=r"not "):
        DOCUMENTS[name][0](foreign)


class Row(NamedTuple):
    name: Annotated[str, Length(1, 4)]
    count: codec.Count
    value: Annotated[float, Number(0.0, 10.0, digits=3)]
    gap: Annotated[float, Number(gaps=True)]


@codec.stored_as("a table", version=2, optional=("limit",), omit=("clock_s",), rows="lines")
class Table(NamedTuple):
    clock_s: float
    rows: tuple[Row, ...]
    limit: Annotated[float, Number(infinite=True)] = math.inf


def test_encode_writes_the_documented_format() -> None:
    table = Table(5.0, (Row("a", 1, 3.14159, math.nan), Row("b", 2, 1.0, 2.0)), 7.0)
    stored = {"version": 2, "lines": [["a", 1, 3.14, None], ["b", 2, 1.0, 2.0]], "limit": 7.0}
    assert codec.encode(table) == stored
    read = codec.decode(Table, stored, clock_s=9.0)
    assert (read.clock_s, read.limit, read.rows[1]) == (9.0, 7.0, table.rows[1])
    assert codec.encode(Table(5.0, ())) == {"version": 2, "lines": []}
    assert codec.decode(Table, {"version": 2, "lines": [], "limit": None}, clock_s=0.0).limit == math.inf
    assert (
        codec.decode(Table, {"version": 2, "lines": [], "limit": "infinite", "new": 1}, clock_s=0.0).limit == math.inf
    )


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (["", 1, 1.0, 1.0], r"has 0 parts, not 1 to 4"),
        (["a", 1.5, 1.0, 1.0], r"1\.5 is not an integer"),
        (["a", True, 1.0, 1.0], r"True is not an integer"),
        (["a", 1, 11.0, 1.0], r"11\.0 is not a number of at least 0 and at most 10"),
        (["a", 1, math.nan, 1.0], r"nan is not a number"),
        (["a", 1, None, 1.0], r"None is not a number"),
        (["a", 1, 1.0], r"has 3 parts, not 4"),
        ({}, r"is not a list"),
    ],
)
def test_decode_invalid_field_names_place_and_value(row: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"not a table: lines: .*{message}"):
        codec.decode(Table, {"version": 2, "lines": [row]}, clock_s=0.0)
