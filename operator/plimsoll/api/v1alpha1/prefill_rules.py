"""Rules about fields that need a prefill tier."""

from __future__ import annotations

from typing import Any, Final

from plimsoll.api.v1alpha1.api_model import ValidationRule
from plimsoll.api.v1alpha1.engine_features import FORBIDDEN

SERVE_ALONE: Final = "(!has(self.tiers) || has(self.tiers.serve))"


def serves_alone(spec: Any) -> bool:
    """Whether a spec has no prefill tier."""
    return spec.targets is not None or spec.tiers.serve is not None


PREFILL_RULES: Final[tuple[ValidationRule[Any], ...]] = (
    ValidationRule(
        f"!has(self.scaling) || !has(self.scaling.prefillPerDecode) || !{SERVE_ALONE}",
        "prefillPerDecode is allowed only with prefill and decode tiers, not with serve",
        lambda own: own.scaling.prefill_per_decode is None or not serves_alone(own),
        field=".scaling.prefillPerDecode",
        reason=FORBIDDEN,
    ),
    ValidationRule(
        "!has(self.whenPrefillUnavailable) || self.whenPrefillUnavailable == 'Serve' ||"
        f" (has(self.tiers) && !{SERVE_ALONE})",
        "Reject is allowed only with prefill and decode tiers: other engines compute each prompt themselves",
        lambda own: own.when_prefill_unavailable == "Serve" or not serves_alone(own),
        field=".whenPrefillUnavailable",
        reason=FORBIDDEN,
    ),
)
