"""The list of desired adapters: what the operator writes, the launcher reads."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.engines.desired_adapters import Adapter, dump, parse

ADAPTERS = st.builds(
    Adapter, st.text(min_size=1), st.sampled_from(["hf", "pvc", "file"]), st.text(), st.text(), st.booleans()
)


@given(st.lists(ADAPTERS, unique_by=lambda adapter: adapter.name))
def test_parse_returns_what_was_dumped(adapters: list[Adapter]) -> None:
    assert list(parse(dump(adapters).encode()).values()) == adapters


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"adapters": {}}', '{"adapters": [{"name": 1}]}', '{"adapters": [7]}']
)
def test_parse_of_something_else_raises_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"Expecting value|adapter"):
        parse(text.encode())


def test_engine_name_differs_by_source_only() -> None:
    adapter = Adapter("a/b", "hf", "x/y", "", pinned=True)
    assert adapter.engine_name == Adapter("a/b", "hf", "x/y", "", pinned=False).engine_name
    assert adapter.engine_name.startswith("a/b@")
    assert adapter.engine_name != Adapter("a/b", "hf", "x/y", "v2", pinned=True).engine_name
