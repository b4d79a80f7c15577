"""Rules about speculative decoding and KV offloading: what vLLM cannot combine with them is refused.

With prefill and decode tiers the KV transfer has vLLM's one connector, which offloading needs too, and it does not move
the KV blocks of a draft. Offloading shares memory between the GPUs of one pod.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from plimsoll.api.v1alpha1.api_model import ValidationRule, compile_re2, quote
from plimsoll.api.v1alpha1.engine_features import FORBIDDEN, needs
from plimsoll.api.v1alpha1.prefill_rules import SERVE_ALONE, serves_alone
from plimsoll.engines.engine import Feature

_DRAFT_FLAGS: Final = "^(--spec(ulative.config|.method|.model|.tokens)|-sc)([=. ]|$)"
_DATA_FLAGS: Final = "^-(dp|-data.parallel.size)"
_OFFLOAD_FLAGS: Final = "^--kv.offloading"
_SPECULATIVE: Final = "(has(self.engine) && has(self.engine.speculative))"
_MAX_BATCH: Final = f"({_SPECULATIVE} && has(self.engine.speculative.maxBatch))"
_OFFLOAD: Final = "has(self.kvOffload)"
_ONE_NODE: Final = "(!has(self.tiers.serve.nodes) || self.tiers.serve.nodes == 1)"
_CLAIM: Final = "split('/')[2]"

_Predicate = Callable[[Any], bool]


def _speculates(spec: Any) -> bool:
    return spec.engine.speculative is not None


def _bounds_batch(spec: Any) -> bool:
    return _speculates(spec) and spec.engine.speculative.max_batch is not None


def _offloads(spec: Any) -> bool:
    return spec.kv_offload is not None


def _on_one_node(spec: Any) -> bool:
    return all(tier.nodes == 1 for _, tier in spec.tiers.items())


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


def _only_generate(cel: str, used: _Predicate, field: str) -> ValidationRule[Any]:
    return _refuse(
        cel,
        used,
        field,
        "!has(self.model.task) || self.model.task == 'generate'",
        lambda own: own.model.task == "generate",
        "is allowed only with task generate",
    )


CACHE_AND_DRAFT_RULES: Final[tuple[ValidationRule[Any], ...]] = (
    needs(Feature.SPECULATION, _SPECULATIVE, _speculates, field=".engine.speculative"),
    _only_generate(_SPECULATIVE, _speculates, ".engine.speculative"),
    _refuse(
        _SPECULATIVE,
        _speculates,
        ".engine.speculative",
        f"!has(self.tiers) || ({SERVE_ALONE} && {_ONE_NODE})",
        lambda own: serves_alone(own) and _on_one_node(own),
        "needs the tier serve with nodes 1: a KV transfer does not move the blocks of a draft",
    ),
    _no_flags(
        _SPECULATIVE, _speculates, _DRAFT_FLAGS, "may not have flags of speculative decoding with engine.speculative"
    ),
    _no_flags(
        _MAX_BATCH,
        _bounds_batch,
        _DATA_FLAGS,
        "may not set --data-parallel-size with engine.speculative.maxBatch: vLLM then drafts in any batch",
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
    needs(Feature.KV_OFFLOAD, _OFFLOAD, _offloads, field=".kvOffload"),
    _only_generate(_OFFLOAD, _offloads, ".kvOffload"),
    _refuse(
        _OFFLOAD,
        _offloads,
        ".kvOffload",
        f"!has(self.tiers) || ({SERVE_ALONE} && {_ONE_NODE})",
        lambda own: serves_alone(own) and _on_one_node(own),
        "needs the tier serve with nodes 1: vLLM has one KV connector, and a KV transfer needs it",
    ),
    _refuse(
        _OFFLOAD,
        _offloads,
        ".kvOffload",
        "!has(self.tiers) || !has(self.tiers.serve) || !has(self.tiers.serve.gpus) || self.tiers.serve.gpus > 0",
        lambda own: all(tier.gpus > 0 for _, tier in own.tiers.items()),
        "needs tiers.serve.gpus above 0: an engine without GPUs keeps its KV cache in CPU memory anyway",
    ),
    _no_flags(_OFFLOAD, _offloads, _OFFLOAD_FLAGS, "may not have --kv-offloading flags with kvOffload"),
)
