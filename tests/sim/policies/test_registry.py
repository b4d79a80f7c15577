"""Policies as users write them."""

from __future__ import annotations

import pytest

from plimsoll.core.types import Role
from plimsoll.sim.errors import BadInput
from plimsoll.sim.policies import registry
from plimsoll.sim.policies.options import PolicyOptions
from tests.sim.policies.observations import BOTH, SERVE


def test_parse_known_policies_sets_replicas_and_admission() -> None:
    assert registry.parse("plimsoll", SERVE).runs_operator
    static = registry.parse("static:3", SERVE)
    assert static.initial_replicas == {Role.SERVE: 3}
    assert not static.runs_operator
    assert registry.parse("static:2,1,gated=1", BOTH).runs_operator
    assert registry.parse("static:2,1", BOTH).initial_replicas == {Role.PREFILL: 2, Role.DECODE: 1}
    assert registry.parse("follower:margin=0.6,spare=1,gated=0", SERVE).runs_operator is False


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("magic", "none of plimsoll, static"),
        ("", "none of plimsoll"),
        ("hindsigth", "clairvoyant, .*, follower-frontier, hindsight$"),
        ("plimsoll:3", "options are key=value"),
        ("plimsoll:x=1", "unknown x"),
        ("static", "1 whole number"),
        ("static:a", "1 whole number"),
        ("static:1,2", "1 whole number"),
        ("static:-1", "1 whole number"),
        ("static:1,gated=x", "gated is 0 or 1"),
        ("static:1,speed=2", "unknown speed"),
        ("follower:margin=0", "above 0"),
        ("follower:margin=x", "margin is a number"),
        ("follower:spare=-1", "at least 0"),
        ("static:1001", "1 whole number up to 1,000"),
        (f"static:{'9' * 5000}", "1 whole number up to 1,000"),
        (f"follower:cap={'9' * 5000}", "at most 1,000,000, not '999"),
        (f"clairvoyant:plan=0@{'9' * 5000}", "plan is like"),
        ("follower:margin=5e-324", "margin is at least 0.000000001"),
        ("follower:hold=1e300", "hold is a number of at least 0 and at most 1000000000"),
        ("follower:window=1e300", "window is a number above 0 and at most 1000000000"),
        ("hpa-queue:sync=1e-9", "sync is at least 1 s, not 0.000000001"),
        ("wva:cycle=0.5", "cycle is at least 1 s"),
        ("wva-queueing:cycle=0.5", "cycle is at least 1 s"),
        ("follower:window=inf", "window is a number above 0"),
        ("follower:hold=nan", "hold is a number"),
        ("follower:lead=2", "unknown lead"),
        ("follower:1", "options are key=value"),
        ("follower:hold=1,hold=2", "hold is given twice"),
    ],
)
def test_parse_malformed_policies_are_rejected(text: str, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        registry.parse(text, SERVE)


@pytest.mark.parametrize("name", [name for name in registry.names() if name != "clairvoyant"])
def test_search_every_setting_is_unique_and_parses(name: str) -> None:
    if name.startswith("dynamo-"):
        pytest.importorskip("dynamo.planner")
    tried = registry.search_space(name)
    assert len(set(tried)) == len(tried) > 0
    for text in tried if name != "static" else ():
        registry.parse(text, SERVE)


@pytest.mark.parametrize("name", [name for name in registry.names() if name != "static"])
def test_parse_unknown_option_is_rejected_by_name(name: str) -> None:
    with pytest.raises(BadInput, match="unknown warp"):
        registry.parse(f"{name}:warp=9", SERVE)


def test_options_value_above_limit_names_the_limit() -> None:
    with pytest.raises(BadInput, match=r"above 0 and at most 1, not 1\.5"):
        PolicyOptions("--policy x", "share=1.5").positive("share", 0.5, maximum=1.0)
