"""Rules about speculative decoding and KV offloading: what vLLM cannot combine with them is refused.

With prefill and decode tiers the KV transfer has vLLM's one connector, which offloading needs too, and it does not move
the KV blocks of a draft. Offloading shares memory between the GPUs of one pod.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from plimsoll.api.v1alpha1.api_model import ValidationRule, compile_re2, quote
from plimsoll.api.v1alpha1.engine_features import FORBIDDEN, needs
from plimsoll.api.v1alpha1.prefill_rules import serves_alone
from plimsoll.engines.engine import Feature

_OWN_FLAGS: Final = "^(--spec(ulative.config|.method|.model|.tokens)|-sc|--kv.offloading.*)([=. ]|$)"
_DATA_FLAGS: Final = "^-(dp|-data.parallel.size)"
_SPECULATIVE: Final = "(has(self.engine) && has(self.engine.speculative))"
_MAX_BATCH: Final = f"({_SPECULATIVE} && has(self.engine.speculative.maxBatch))"
_OFFLOAD: Final = "has(self.kvOffload)"
_ONE_POD: Final = (
    "(!has(self.model.task) || self.model.task == 'generate') && (!has(self.tiers) ||"
    " (has(self.tiers.serve) && (!has(self.tiers.serve.nodes) || self.tiers.serve.nodes == 1)"
)
_CLAIM: Final = "split('/')[2]"

_Predicate = Callable[[Any], bool]


def _speculates(spec: Any) -> bool:
    return spec.engine.speculative is not None


def _bounds_batch(spec: Any) -> bool:
    return _speculates(spec) and spec.engine.speculative.max_batch is not None


def _offloads(spec: Any) -> bool:
    return spec.kv_offload is not None


def _in_one_pod(spec: Any) -> bool:
    is_single = serves_alone(spec) and all(tier.nodes == 1 for _, tier in spec.tiers.items())
    return is_single and spec.model.task == "generate"


def _shares_claim(spec: Any) -> bool:
    claim = spec.engine.speculative.draft_claim if _speculates(spec) else None
    return claim is None or (spec.model.claim is not None and spec.model.claim[0] == claim[0])


def _refuse(cel: str, used: _Predicate, field: str, fits_cel: str, fits: _Predicate, says: str) -> ValidationRule[Any]:
    return ValidationRule(
        f"!{cel} || {fits_cel}", says, lambda own: not used(own) or fits(own), field=field, reason=FORBIDDEN
    )


def _no_flags(cel: str, used: _Predicate, pattern: str, says: str) -> ValidationRule[Any]:
    regex = compile_re2(pattern)
    return _refuse(
        cel,
        used,
        ".engine.args",
        f"!has(self.engine) || !has(self.engine.args) || !self.engine.args.exists(arg, arg.matches({quote(pattern)}))",
        lambda own: not any(map(regex.search, own.engine.args)),
        says,
    )


CACHE_AND_DRAFT_RULES: Final[tuple[ValidationRule[Any], ...]] = (
    needs(Feature.SPECULATION, _SPECULATIVE, _speculates, field=".engine.speculative"),
    _refuse(
        _SPECULATIVE,
        _speculates,
        ".engine.speculative",
        f"({_ONE_POD})))",
        _in_one_pod,
        "needs task generate, and the tier serve with nodes 1: a KV transfer does not move the blocks of a draft",
    ),
    _refuse(
        _SPECULATIVE,
        _speculates,
        ".engine.speculative.draft",
        "!has(self.engine.speculative.draft) || !self.engine.speculative.draft.startsWith('pvc://') ||"
        f" (self.model.uri.startsWith('pvc://') && self.engine.speculative.draft.{_CLAIM} == self.model.uri.{_CLAIM})",
        _shares_claim,
        "a pvc:// draft must be in the claim of model.uri",
    ),
    _no_flags(
        _MAX_BATCH,
        _bounds_batch,
        _DATA_FLAGS,
        "may not set --data-parallel-size with engine.speculative.maxBatch: vLLM then drafts in any batch",
    ),
    needs(Feature.KV_OFFLOAD, _OFFLOAD, _offloads, field=".kvOffload"),
    _refuse(
        _OFFLOAD,
        _offloads,
        ".kvOffload",
        f"({_ONE_POD} && (!has(self.tiers.serve.gpus) || self.tiers.serve.gpus > 0))))",
        lambda own: _in_one_pod(own) and all(tier.gpus > 0 for _, tier in own.tiers.items()),
        "needs task generate, and the tier serve with nodes 1 and gpus above 0: vLLM has one KV connector, which a KV "
        "transfer takes",
    ),
    _no_flags(
        f"({_OFFLOAD} || {_SPECULATIVE})",
        lambda own: _speculates(own) or _offloads(own),
        _OWN_FLAGS,
        "may not have flags of speculative decoding or KV offloading with engine.speculative or kvOffload",
    ),
)
