"""Speculative decoding and KV offloading, broken once or more; see `tests.api.cases`."""

from __future__ import annotations

from typing import Any

from tests.api.cases import Case
from tests.api.manifests import adopted, aggregated, service

DRAFT, OFFLOAD, ARGS = "spec.engine.speculative", "spec.kvOffload", "spec.engine.args"
NGRAM, EAGLE = {"method": "ngram"}, {"method": "eagle3", "draft": "hf://org/head"}
MEMORY = {"memory": "64Gi"}
NO_DRAFT = " has no speculative decoding: remove engine.speculative, or use engine vllm"
NO_OFFLOAD = " has no KV cache in CPU memory: remove kvOffload, or use engine vllm"
ONE_POD = "needs task generate, and the tier serve with nodes 1"
OWN_FLAGS = "may not have flags of speculative decoding or KV offloading with engine.speculative or kvOffload"
NODES = {"spec.tiers.serve.nodes": 2}


def _spec(path: str, value: Any, says: str, at: str = "", server: str = "", **more: Any) -> Case:
    base = more.pop("base", aggregated)
    return Case({path: value, **more.pop("also", {})}, at or path, says, server, base=base, **more)


DRAFT_CASES = [
    _spec(DRAFT, {"method": "medusa"}, "must be 'ngram', 'mtp'", f"{DRAFT}.method", "Unsupported value"),
    _spec(DRAFT, {}, "is required", f"{DRAFT}.method", "Required value"),
    *[
        _spec(DRAFT, {**NGRAM, field: number}, says, f"{DRAFT}.{field}", f"should be {server}")
        for field, number, says, server in (
            ("tokens", 0, "must be at least 1", "greater than or equal to 1"),
            ("tokens", 17, "must be at most 16", "less than or equal to 16"),
            ("maxBatch", 0, "must be at least 1", "greater than or equal to 1"),
            ("maxBatch", 1025, "must be at most 1024", "less than or equal to 1024"),
        )
    ],
    *[
        _spec(DRAFT, {"method": method}, "is required with method draft_model, eagle, eagle3", f"{DRAFT}.draft")
        for method in ("eagle", "eagle3", "draft_model")
    ],
    *[
        _spec(DRAFT, {**EAGLE, "method": method}, "and not allowed with the others", f"{DRAFT}.draft")
        for method in ("ngram", "mtp")
    ],
    _spec(
        DRAFT,
        {**EAGLE, "draft": "s3://b/head"},
        "must be hf://ORG/REPO, pvc://CLAIM/PATH or file:///PATH",
        f"{DRAFT}.draft",
    ),
    *[
        _spec(DRAFT, {**EAGLE, field: text}, says, f"{DRAFT}.{field}", server)
        for field, text, says, server in (
            ("draft", "", "must not be empty", "should be at least 1 chars long"),
            ("draft", "hf://a/" + "b" * 1024, "must have at most 1024 characters", "Too long"),
            ("draft", "hf://a/../b", "must be hf://ORG/REPO, pvc://CLAIM/PATH or file:///PATH", ""),
            ("revision", "", "must not be empty", "should be at least 1 chars long"),
            ("revision", "a" * 129, "must have at most 128 characters", "Too long"),
            ("revision", "-x", "must be a branch, a tag or a commit", ""),
        )
    ],
    _spec(OFFLOAD, {"memory": "1" * 33}, "must have at most 32 characters", f"{OFFLOAD}.memory", "Too long"),
    _spec(DRAFT, {**NGRAM, "revision": "main"}, "is allowed only with an hf:// draft", f"{DRAFT}.revision"),
    *[
        _spec(
            DRAFT,
            {**EAGLE, "draft": "pvc://heads/eagle"},
            "a pvc:// draft must be in the claim of model.uri",
            f"{DRAFT}.draft",
            also={"spec.model.uri": uri},
        )
        for uri in ("pvc://models/chat", "hf://org/chat")
    ],
    *[
        _spec(DRAFT, NGRAM, f"engine {runtime}{NO_DRAFT}", also={"spec.engine.runtime": runtime, **more})
        for runtime, more in (("simulated", {}), ("sglang", {"spec.engine.image": "example.com/x:1"}))
    ],
    _spec(DRAFT, NGRAM, ONE_POD, also={"spec.model.task": "embed"}),
    _spec(DRAFT, NGRAM, ONE_POD, base=service),
    _spec(DRAFT, NGRAM, ONE_POD, also=NODES),
    *[
        _spec(ARGS, args, OWN_FLAGS, also={DRAFT: NGRAM})
        for args in (["--speculative-config={}"], ["--speculative_config.method", "ngram"], ["-sc", "{}"])
    ],
    _spec(
        ARGS,
        ["-dp", "2"],
        "may not set --data-parallel-size with engine.speculative.maxBatch",
        also={DRAFT: {**NGRAM, "maxBatch": 8}, "spec.tiers.serve.gpus": 2},
    ),
    _spec(DRAFT, NGRAM, "is not allowed with targets: Plimsoll does not run their engines", base=adopted),
    _spec(OFFLOAD, {}, "is required", f"{OFFLOAD}.memory", "Required value"),
    *[
        _spec(OFFLOAD, {"memory": memory}, "must be a quantity above zero, such as 64Gi", f"{OFFLOAD}.memory")
        for memory in ("0", "64GB", "-1Gi")
    ],
    _spec(OFFLOAD, MEMORY, f"engine simulated{NO_OFFLOAD}", also={"spec.engine.runtime": "simulated"}),
    _spec(OFFLOAD, MEMORY, ONE_POD, also={"spec.model.task": "score"}),
    _spec(OFFLOAD, MEMORY, ONE_POD, base=service),
    _spec(OFFLOAD, MEMORY, ONE_POD, also=NODES),
    _spec(OFFLOAD, MEMORY, f"{ONE_POD} and gpus above 0: ", also={"spec.tiers.serve.gpus": 0}),
    _spec(ARGS, ["--kv_offloading_backend=lmcache"], OWN_FLAGS, also={OFFLOAD: MEMORY}),
    _spec(OFFLOAD, MEMORY, "is not allowed with targets: Plimsoll does not run their engines", base=adopted),
]
VALID_DRAFTS: list[dict[str, Any]] = [
    {DRAFT: NGRAM},
    {DRAFT: {"method": "mtp", "tokens": 1, "maxBatch": 1024}},
    {DRAFT: {**EAGLE, "revision": "main", "tokens": 16, "maxBatch": 1}},
    {DRAFT: {"method": "draft_model", "draft": "pvc://models/a/draft"}, "spec.model.uri": "pvc://models/chat"},
    {DRAFT: {"method": "eagle", "draft": "file:///opt/head"}, OFFLOAD: {"memory": "0.5Ti"}},
    {DRAFT: NGRAM, ARGS: ["-dp", "2", "--spec", "x"], "spec.tiers.serve.gpus": 2, OFFLOAD: MEMORY},
]
