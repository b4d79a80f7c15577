"""What is refused is named, never what may be secret about it."""

from __future__ import annotations

import pytest

from plimsoll.api.v1alpha1 import parse
from plimsoll.core.errors import InvalidSpec
from tests import builders


@pytest.mark.parametrize("arg", ["--api-key=s3cret", "--api-key s3cret"])
def test_rejected_flag_value_is_not_repeated(arg: str) -> None:
    with pytest.raises(InvalidSpec) as caught:
        parse(builders.service(engine={"args": [arg]}))
    assert "--api-key" in str(caught.value)
    assert "s3cret" not in str(caught.value)


def test_request_above_its_limit_is_named() -> None:
    resources = {"requests": {"cpu": 1, "memory": "2Gi"}, "limits": {"cpu": 1, "memory": "1Gi"}}
    with pytest.raises(InvalidSpec, match=r"lower the request or raise the limit of memory$"):
        parse(builders.service(tiers={"serve": {"pod": {"resources": resources}}}))
