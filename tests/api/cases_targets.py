"""The table of `tests.api.cases` for targets."""

from __future__ import annotations

from tests.api.cases import Case, single_edit, text_cases
from tests.api.manifests import ABSENT, adopted, adopted_pair

_TARGET = "spec.targets.serve"
_REF = f"{_TARGET}.scaleTargetRef"
_REQUIRED = ("is required", "Required value")
_SELECTOR = "must be a label selector of equalities, such as app=llm,tier=serve"
_NOT_RUN = "is not allowed with targets: Plimsoll does not run their engines"
_NO_GATEWAY = "is not allowed with targets without targets.serve.port: their requests do not pass the gateway"
_SHAPE = "use either serve alone, or prefill and decode"
_OTHER = {"scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "other"}}
_NO_LIMIT = "is not allowed with targets: only engines that Plimsoll runs add it to requests"

TARGET_CASES = [
    Case({"spec.tiers": {"serve": {}}}, "spec.tiers", "tiers and targets exclude each other", base=adopted),
    Case({"spec.targets": ABSENT}, "spec.tiers", "tiers or targets is required: use tiers for engines", base=adopted),
    Case({_TARGET: ABSENT}, "spec.targets", f"has no tier: {_SHAPE}", base=adopted),
    *[
        Case({f"spec.targets.{role}": ABSENT}, "spec.targets", f"has {other} alone: {_SHAPE}", base=adopted_pair)
        for role, other in (("prefill", "decode"), ("decode", "prefill"))
    ],
    Case(
        {_TARGET: {**_OTHER, "maxReplicas": 1}},
        "spec.targets",
        f"has prefill, decode and serve: {_SHAPE}",
        base=adopted_pair,
    ),
    *[
        Case(
            {f"spec.targets.{role}.port": 8000},
            f"spec.targets.{role}.port",
            "is not allowed for prefill and decode: gateways cannot route to pairs that something else manages",
            base=adopted_pair,
        )
        for role in ("prefill", "decode")
    ],
    Case(
        {"spec.targets.decode.scaleTargetRef.name": "llm-prefill"},
        "spec.targets.decode.scaleTargetRef",
        "must not be the object of prefill: each role has a replica count of its own",
        base=adopted_pair,
    ),
    Case(
        {"spec.targets.decode.scaleTargetRef": {"apiVersion": "apps/v2", "kind": "Deployment", "name": "llm-prefill"}},
        "spec.targets.decode.scaleTargetRef",
        "must not be the object of prefill",
        base=adopted_pair,
    ),
    Case(
        {"spec.model.task": "embed"},
        "spec.model.task",
        "task needs the tier serve unless it is generate",
        "Forbidden",
        base=adopted_pair,
    ),
    Case(
        {"spec.slo": {"tpot": "50ms"}},
        "spec.slo.ttft",
        "is required with targets.prefill: no other target sizes prefill engines, and minReplicas would be recommended",
        "Required value",
        base=adopted_pair,
    ),
    Case(
        {"spec.slo": {"e2e": "10s"}},
        "spec.slo.ttft",
        "is required with targets.prefill: no other target sizes prefill engines",
        "Required value",
        base=adopted_pair,
    ),
    single_edit("spec.admission", {}, _NO_GATEWAY, base=adopted_pair),
    single_edit(_REF, ABSENT, *_REQUIRED, base=adopted),
    *[single_edit(f"{_REF}.{name}", ABSENT, *_REQUIRED, base=adopted) for name in ("apiVersion", "kind", "name")],
    single_edit(f"{_TARGET}.maxReplicas", ABSENT, *_REQUIRED, base=adopted),
    *text_cases(
        f"{_REF}.apiVersion", 317, "must be GROUP/VERSION or VERSION", ("apps", "apps/v1/x", "Apps/v1"), base=adopted
    ),
    *text_cases(
        f"{_REF}.kind", 63, "must be a kind, such as Deployment", ("deployment", "apps/Deployment"), base=adopted
    ),
    *text_cases(f"{_REF}.name", 253, "must be the name of an object", ("LLM", "-llm", "a/b"), base=adopted),
    *text_cases(f"{_TARGET}.podSelector", 1024, _SELECTOR, ("app in (a)", "=a", "app=a,", "!app"), base=adopted),
    single_edit(f"{_TARGET}.metricsPort", 0, "must be at least 1", "greater than or equal to 1", base=adopted),
    single_edit(f"{_TARGET}.metricsPort", 65536, "must be at most 65535", "less than or equal to 65535", base=adopted),
    single_edit(f"{_TARGET}.port", 0, "must be at least 1", "greater than or equal to 1", base=adopted),
    single_edit(f"{_TARGET}.port", 65536, "must be at most 65535", "less than or equal to 65535", base=adopted),
    single_edit(f"{_TARGET}.minReplicas", 0, "must be at least 1", "greater than or equal to 1", base=adopted),
    single_edit(f"{_TARGET}.minReplicas", 1001, "must be at most 1000", "less than or equal to 1000", base=adopted),
    single_edit(f"{_TARGET}.maxReplicas", 0, "must be at least 1", "greater than or equal to 1", base=adopted),
    single_edit(f"{_TARGET}.maxReplicas", 1001, "must be at most 1000", "less than or equal to 1000", base=adopted),
    Case(
        {f"{_TARGET}.minReplicas": 5},
        f"{_TARGET}.maxReplicas",
        "maxReplicas 4 must not be below minReplicas 5: raise maxReplicas, or lower minReplicas",
        base=adopted,
    ),
    single_edit(f"{_TARGET}.gpus", -1, "must be at least 0", "greater than or equal to 0", base=adopted),
    single_edit(f"{_TARGET}.gpus", 65, "must be at most 64", "less than or equal to 64", base=adopted),
    single_edit("spec.adapters", [], _NOT_RUN, base=adopted),
    single_edit("spec.adapters", [{"name": "a", "uri": "hf://a/b"}], _NOT_RUN, base=adopted),
    *[
        Case(
            {"spec.engine": {"runtime": runtime, "image": "example.com/x:1"}},
            "spec.targets",
            f"engine {runtime} has no metrics by which targets are sized: remove targets, or use engine vllm",
            base=adopted,
        )
        for runtime in ("llama-cpp", "sglang", "tensorrt-llm", "tgi", "openai")
    ],
    single_edit("spec.engine.image", "vllm/vllm-openai:v0.32.0", _NOT_RUN, base=adopted),
    single_edit("spec.engine.version", "1", _NOT_RUN, base=adopted),
    single_edit("spec.engine.args", ["--max-num-seqs=8"], _NOT_RUN, base=adopted),
    single_edit("spec.engine.env", [{"name": "A", "value": "b"}], _NOT_RUN, base=adopted),
    single_edit("spec.engine.drainTimeout", "60s", _NOT_RUN, base=adopted),
    single_edit("spec.engine.lora", {}, _NOT_RUN, base=adopted),
    single_edit("spec.engine.tuning", "Off", _NOT_RUN, base=adopted),
    single_edit("spec.model.cache", {"claimName": "hf"}, _NOT_RUN, base=adopted),
    single_edit("spec.model.secretRef", {"name": "hf"}, _NOT_RUN, base=adopted),
    single_edit("spec.engine.prefixCache", "Shared", _NOT_RUN, base=adopted),
    single_edit("spec.admission", {}, _NO_GATEWAY, base=adopted),
    single_edit("spec.requestLimits", {"maxDuration": "60s"}, _NO_GATEWAY, base=adopted),
    Case(
        {f"{_TARGET}.port": 8000, "spec.requestLimits": {"maxOutputTokens": 8}},
        "spec.requestLimits.maxOutputTokens",
        _NO_LIMIT,
        base=adopted,
    ),
    Case(
        {
            f"{_TARGET}.port": 8000,
            "spec.admission": {"classes": [{"name": "a", "requestLimits": {"maxOutputTokens": 8}}]},
        },
        "spec.admission.classes",
        f"requestLimits.maxOutputTokens of a class {_NO_LIMIT}",
        base=adopted,
    ),
    single_edit(
        "spec.scaling.schedule",
        [{"from": "08:00", "until": "20:00", "minReplicas": 0}],
        "minReplicas 0 is not allowed with targets: they do not scale to zero",
        base=adopted,
    ),
    Case(
        {"spec.slo": ABSENT, "spec.scaling.mode": "Auto"},
        "spec.slo",
        "is required with targets in mode Auto: without it nothing is sized",
        "Required value",
        base=adopted,
    ),
]
