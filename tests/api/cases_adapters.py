"""The table of `tests.api.cases` for LoRA adapters."""

from __future__ import annotations

from typing import Any

from tests.api.cases import Case, single_edit, text_cases
from tests.api.manifests import aggregated


def _adapters(*adapters: dict[str, Any], **edits: Any) -> dict[str, Any]:
    named = [{"name": f"a{number}", "uri": "hf://acme/sql", **adapter} for number, adapter in enumerate(adapters)]
    return {"spec.adapters": named, **edits}


_ADAPTER = "spec.adapters[0]"
_LORA = "spec.engine.lora"
_LORA_ARGS = (
    "--enable-lora",
    "--max-loras=2",
    "--lora_modules",
    "--api-server-count",
    "-dp=2",
    "--max-lora-rank=8",
    "--max_cpu_loras",
    "--data-parallel-size=2",
    "-asc",
)

ADAPTER_CASES = [
    *text_cases(
        "spec.adapters",
        128,
        "must begin with a letter or digit and have only letters, digits",
        ("-sql", "my sql", "sql@2"),
        at=f"{_ADAPTER}.name",
        build=lambda name: [{"name": name, "uri": "hf://acme/sql"}],
        base=aggregated,
    ),
    *[
        Case(_adapters({"uri": uri}), f"{_ADAPTER}.uri", says, server, base=aggregated)
        for uri, says, server in (
            ("", "must not be empty", "should be at least 1 chars long"),
            ("hf://a/" + "b" * 1024, "must have at most 1024 characters", "Too long"),
            ("s3://bucket/a", "has unknown scheme s3://; use hf://ORG/REPO, pvc://CLAIM/PATH or file:///PATH", ""),
            ("ftp://host/a", "has unknown scheme ftp://; use hf://ORG/REPO", ""),
            ("acme/sql", "has no scheme; use hf://ORG/REPO", ""),
            ("hf://acme", "must have exactly an organisation and a repository: hf://ORG/REPO", ""),
            ("pvc://claim/../x", "must have a claim and a path in it, without '..': pvc://CLAIM/PATH", ""),
            ("file:///opt/../etc", "must have an absolute path in the engine image, without '..'", ""),
        )
    ],
    Case({"spec.adapters": [{"name": "a"}]}, f"{_ADAPTER}.uri", "is required", "Required value", base=aggregated),
    Case(
        {"spec.adapters": [{"uri": "hf://a/b"}]},
        f"{_ADAPTER}.name",
        "is required",
        "Required value",
        ("spec.adapters", "omits all key fields"),
        base=aggregated,
    ),
    *text_cases(
        "spec.adapters",
        253,
        "must be a branch, a tag or a commit",
        ("a b",),
        at=f"{_ADAPTER}.revision",
        build=lambda revision: [{"name": "a", "uri": "hf://acme/sql", "revision": revision}],
        base=aggregated,
    ),
    Case(
        _adapters({"uri": "pvc://claim/a", "revision": "main"}),
        f"{_ADAPTER}.revision",
        "revision is allowed only for hf:// adapters",
        base=aggregated,
    ),
    Case(
        {"spec.adapters": [{"name": "a", "uri": "hf://a/b"}] * 2},
        "spec.adapters[1]",
        "a is listed twice",
        "Duplicate value",
        ("spec.adapters", "duplicate entries"),
        base=aggregated,
    ),
    Case(
        _adapters(*[{"uri": "hf://acme/" + "b" * 900}] * 40),
        "spec.adapters",
        "names, URIs and revisions must together have at most 32768 characters",
        base=aggregated,
    ),
    Case(_adapters(*[{}] * 257), "spec.adapters", "must have at most 256 entries", "Too many", base=aggregated),
    Case(
        _adapters({}, {}, **{f"{_LORA}.maxCpuLoras": 1, f"{_LORA}.maxLoras": 1}),
        "spec.adapters",
        "has 2 entries and an engine holds 1: raise engine.lora.maxCpuLoras, or remove some",
        base=aggregated,
    ),
    Case(
        _adapters({"name": "draft"}, **{"metadata.name": "draft"}),
        "spec.adapters",
        "an adapter needs another name than the model: rename the adapter draft, or set model.name",
        base=aggregated,
    ),
    Case(
        _adapters({"name": "m"}, **{"spec.model.name": "m"}),
        "spec.adapters",
        "an adapter needs another name than the model: rename the adapter m, or set model.name",
        base=aggregated,
    ),
    Case(
        _adapters({}, **{"spec.model.task": "embed"}), "spec.adapters", "need the model task generate", base=aggregated
    ),
    Case(
        {f"{_LORA}": {}, "spec.model.task": "transcribe"},
        "spec.adapters",
        "need the model task generate",
        base=aggregated,
    ),
    Case(_adapters({}), "spec.adapters", "need the tier serve: remote prefill does not support them"),
    *[
        Case(
            _adapters({}, **{"spec.engine.args": [arg], "spec.tiers.serve.gpus": 2}),
            "spec.engine.args",
            "args may not set LoRA flags",
            base=aggregated,
        )
        for arg in _LORA_ARGS
    ],
    *[
        single_edit(f"{_LORA}.{name}", 0, "must be at least 1", "greater than or equal to", base=aggregated)
        for name in ("maxLoras", "maxCpuLoras")
    ],
    *[
        single_edit(f"{_LORA}.{name}", 257, "must be at most 256", "less than or equal to", base=aggregated)
        for name in ("maxLoras", "maxCpuLoras")
    ],
    single_edit(
        f"{_LORA}.maxLoraRank", 12, "must be 8, 16, 32, 64, 128, 256, 320 or 512", "Unsupported value", base=aggregated
    ),
    Case(
        {f"{_LORA}.maxCpuLoras": 7},
        f"{_LORA}.maxCpuLoras",
        "maxCpuLoras 7 must be at least maxLoras 8: raise",
        base=aggregated,
    ),
]
