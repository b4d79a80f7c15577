"""Rules for the name of an InferenceService, in its metadata and in references to it."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import Field

from plimsoll.api.v1alpha1.api_model import ValidationRule, ValidationRules, matching

MAX_NAME_CHARS: Final = 40

# Names of Deployments and Services are the service's name, the tier's role and a hash.
_NAME_RULE: Final = matching(
    "^[a-z]([-a-z0-9]*[a-z0-9])?$",
    "must begin with a lower-case letter, end with a letter or digit, and have only lower-case letters, digits and"
    " '-': names of Services contain it",
)
NAME_RULES: Final = (
    ValidationRule[str](
        f"self.size() <= {MAX_NAME_CHARS}",
        f"must have at most {MAX_NAME_CHARS} characters: names of Services contain it",
        lambda name: len(name) <= MAX_NAME_CHARS,
    ),
    _NAME_RULE,
)
ServiceName = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS), ValidationRules(_NAME_RULE)]
