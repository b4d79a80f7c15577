from __future__ import annotations

import copy
import json
import sys
from typing import Any

import pytest

from plimsoll.adapters.shared_parts import with_shared_parts
from tests import builders

SERVICE = builders.service("llama", "team")


def parsed(obj: Any) -> Any:
    """The object as from another answer of the API server: equal, with nothing in common."""
    return json.loads(json.dumps(obj))


def test_equal_object_is_the_earlier_one() -> None:
    first = builders.pod(SERVICE, "decode", "decode-1")
    assert with_shared_parts(parsed(first), first) is first


def test_changed_object_shares_all_other_parts() -> None:
    first: dict[str, Any] = {"metadata": {"name": "a"}, "spec": {"replicas": 1, "template": {"args": ["x", "y"]}}}
    changed = {"metadata": {"name": "a"}, "spec": {"replicas": 7, "template": {"args": ["x", "y"]}}}
    result = with_shared_parts(changed, first)
    assert result == changed
    assert result["metadata"] is first["metadata"]
    assert result["spec"] is not first["spec"]
    assert result["spec"]["template"] is first["spec"]["template"]


@pytest.mark.parametrize(
    ("value", "like"),
    [
        ({"a": 1}, {"a": True}),
        ({"a": True}, {"a": 1}),
        ({"a": 1}, {"a": 1.0}),
        ({"a": 1}, {"a": 1, "b": 2}),
        ({"a": 1, "b": None}, {"a": 1}),
        ({"a": [1, 2]}, {"a": [1]}),
        ({"a": [1]}, {"a": [1, 2]}),
        ({"a": []}, {"a": {}}),
        ({"a": {}}, {"a": []}),
        ([{"a": "x"}], [{"a": "y"}]),
        ("x", None),
        (None, "x"),
    ],
)
def test_result_equals_value_in_type_also(value: Any, like: Any) -> None:
    before = copy.deepcopy(like)
    assert repr(with_shared_parts(value, like)) == repr(value)
    assert repr(like) == repr(before)


def test_pods_of_a_tier_take_a_fraction_of_one() -> None:
    container = {"name": "engine", "env": [{"name": f"NAME_{n}", "value": f"value-{n}"} for n in range(50)]}
    first, second = ({"metadata": {"name": name}, "spec": {"containers": [parsed(container)]}} for name in "ab")
    assert size_of(with_shared_parts(second, first), first) < 0.1 * size_of(second)


def test_field_names_are_stored_once() -> None:
    name = "".join(["replicas", "OfTheTest"])
    (stored,) = with_shared_parts({name: 1}, None)
    assert stored is sys.intern("replicasOfTheTest")


def size_of(obj: Any, *without: Any) -> int:
    """Bytes of an object, without the parts of other objects."""
    seen: dict[int, Any] = {}
    for known in without:
        _collect(known, seen)
    known_ids = set(seen)
    _collect(obj, seen)
    return sum(sys.getsizeof(part) for number, part in seen.items() if number not in known_ids)


def _collect(part: Any, seen: dict[int, Any]) -> None:
    if id(part) in seen:
        return
    seen[id(part)] = part
    children = [*part.keys(), *part.values()] if isinstance(part, dict) else part if isinstance(part, list) else ()
    for child in children:
        _collect(child, seen)
