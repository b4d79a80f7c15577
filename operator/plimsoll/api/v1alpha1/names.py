"""What an InferenceService may be called, where it is named itself and where another one names it."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import Field

from plimsoll.api.v1alpha1.base import Rule, Rules, matching

LONGEST_NAME: Final = 40

# Deployments and Services are named after the service, with the tier's role and a hash behind it.
_FORM: Final = matching(
    "^[a-z]([-a-z0-9]*[a-z0-9])?$",
    "must begin with a lower-case letter, end with a letter or digit, and have only lower-case letters, digits and"
    " '-': names of Services are made from it",
)
NAME_RULES: Final = (
    Rule[str](
        f"self.size() <= {LONGEST_NAME}",
        f"must have at most {LONGEST_NAME} characters: names of Services are made from it",
        lambda name: len(name) <= LONGEST_NAME,
    ),
    _FORM,
)
ServiceName = Annotated[str, Field(min_length=1, max_length=LONGEST_NAME), Rules(_FORM)]
