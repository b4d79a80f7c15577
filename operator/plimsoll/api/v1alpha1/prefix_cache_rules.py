"""Rules about a prefix cache for each tenant: where the engine cannot keep tenants apart, it is refused."""

from __future__ import annotations

from typing import Any, Final

from plimsoll.api.v1alpha1.api_model import ValidationRule
from plimsoll.api.v1alpha1.engine_features import FORBIDDEN, needs
from plimsoll.engines.engine import Feature

_FIELD: Final = ".engine.prefixCache"
_PER_TENANT = "(has(self.engine) && has(self.engine.prefixCache) && self.engine.prefixCache == 'PerTenant')"


def _is_per_tenant(spec: Any) -> bool:
    return bool(spec.engine.prefix_cache == "PerTenant")


PREFIX_CACHE_RULES: Final[tuple[ValidationRule[Any], ...]] = (
    needs(Feature.CACHE_SALT, _PER_TENANT, _is_per_tenant, field=_FIELD),
    ValidationRule(
        f"!{_PER_TENANT} || !has(self.model.task) || self.model.task != 'transcribe'",
        "PerTenant is not allowed with task transcribe: a request with sound takes no salt",
        lambda own: not _is_per_tenant(own) or own.model.task != "transcribe",
        field=_FIELD,
        reason=FORBIDDEN,
    ),
)
