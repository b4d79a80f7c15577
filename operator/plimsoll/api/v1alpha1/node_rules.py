"""Rules about engines of several nodes: what such an engine cannot do is refused."""

from __future__ import annotations

from typing import Any, Final

from plimsoll.api.v1alpha1.api_model import ValidationRule, compile_re2, quote
from plimsoll.api.v1alpha1.engine_features import FORBIDDEN, needs
from plimsoll.engines import vllm
from plimsoll.engines.engine import Feature

_SEVERAL_NODES = (
    "(has(self.tiers) && has(self.tiers.serve) && has(self.tiers.serve.nodes) && self.tiers.serve.nodes > 1)"
)
_LORA = "((has(self.adapters) && size(self.adapters) > 0) || (has(self.engine) && has(self.engine.lora)))"
_GROUP_FLAGS = compile_re2(vllm.GROUP_FLAGS)


def _has_several_nodes(spec: Any) -> bool:
    return any(tier.nodes > 1 for _, tier in spec.tiers.items())


NODE_RULES: Final[tuple[ValidationRule[Any], ...]] = (
    needs(Feature.SEVERAL_NODES, _SEVERAL_NODES, _has_several_nodes, field=".tiers.serve.nodes"),
    ValidationRule(
        f"!{_SEVERAL_NODES} || !{_LORA}",
        "LoRA adapters are not supported with tiers.serve.nodes above 1: remove adapters and engine.lora",
        lambda own: not (_has_several_nodes(own) and (own.adapters or own.engine.lora is not None)),
        field=".adapters",
        reason=FORBIDDEN,
    ),
    ValidationRule(
        f"!{_SEVERAL_NODES} || !has(self.engine) || !has(self.engine.args) ||"
        f" !self.engine.args.exists(arg, arg.matches({quote(vllm.GROUP_FLAGS)}))",
        "may not have a flag about parallel sizes, nodes, executor or API servers with tiers.serve.nodes above 1:"
        " Plimsoll sets them",
        lambda own: not (_has_several_nodes(own) and any(map(_GROUP_FLAGS.search, own.engine.args))),
        field=".engine.args",
        reason=FORBIDDEN,
    ),
)
