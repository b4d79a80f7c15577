"""`spec.engine.speculative`: speculative decoding, in which an engine drafts tokens and verifies them in one step.

vLLM gets it as one argument, so the fields here are those that the operator interprets.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field

from plimsoll.api.v1alpha1.api_model import ApiModel, ValidationRule, ValidationRules, matching
from plimsoll.api.v1alpha1.model import REVISION_RULE, claim_of, scheme_of

DEFAULT_DRAFT_TOKENS: Final = 3
MAX_DRAFT_TOKENS: Final = 16
MAX_BATCH: Final = 1024
DRAFT_METHODS: Final = ("draft_model", "eagle", "eagle3")  # the others draft without weights of their own
_DRAFT_METHODS_CEL: Final = f"[{', '.join(repr(one) for one in DRAFT_METHODS)}]"
_SEGMENT: Final = "[A-Za-z0-9_][A-Za-z0-9._-]*"
_DRAFT_RULE: Final = matching(
    f"^(hf://{_SEGMENT}/{_SEGMENT}|pvc://[a-z0-9][-a-z0-9.]*(/{_SEGMENT})+|file://(/{_SEGMENT})+)$",
    "must be hf://ORG/REPO, pvc://CLAIM/PATH or file:///PATH, without '..'",
)


class SpeculativeSpec(ApiModel):
    """Speculative decoding of vLLM."""

    method: Literal["ngram", "mtp", "eagle", "eagle3", "draft_model"] = Field(
        description="What drafts. ngram: repetitions in the prompt. mtp: layers of the model. Others: that of draft.",
    )
    draft: Annotated[str, Field(min_length=1, max_length=1024), ValidationRules(_DRAFT_RULE)] | None = Field(
        default=None,
        description="hf://ORG/REPO, file:///PATH, or pvc://CLAIM/PATH with the claim of model.uri.",
    )
    revision: Annotated[str, Field(min_length=1, max_length=128), ValidationRules(REVISION_RULE)] | None = Field(
        default=None, description="Branch, tag or commit of an hf:// draft."
    )
    tokens: int = Field(
        default=DEFAULT_DRAFT_TOKENS,
        ge=1,
        le=MAX_DRAFT_TOKENS,
        json_schema_extra={"format": "int32"},
        description=f"Drafted tokens per step: 1 to {MAX_DRAFT_TOKENS}.",
    )
    max_batch: Annotated[int, Field(ge=1, le=MAX_BATCH, json_schema_extra={"format": "int32"})] | None = Field(
        default=None,
        description="Largest batch in which vLLM drafts. Absent: always.",
    )

    rules: ClassVar[tuple[ValidationRule[SpeculativeSpec], ...]] = (
        ValidationRule(
            f"has(self.draft) == (self.method in {_DRAFT_METHODS_CEL})",
            f"is required with method {', '.join(DRAFT_METHODS)}, and not allowed with the others",
            lambda own: (own.draft is not None) == (own.method in DRAFT_METHODS),
            field=".draft",
        ),
        ValidationRule(
            "!has(self.revision) || (has(self.draft) && self.draft.startsWith('hf://'))",
            "is allowed only with an hf:// draft",
            lambda own: own.revision is None or (own.draft is not None and scheme_of(own.draft) == "hf"),
            field=".revision",
            reason="FieldValueForbidden",
        ),
    )

    @property
    def draft_claim(self) -> tuple[str, str] | None:
        """Claim and path of a pvc:// draft."""
        return None if self.draft is None else claim_of(self.draft)
