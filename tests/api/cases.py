"""Every constraint of the API, broken once or more: what is changed, which field is blamed, and in what words.

One table for the three places that judge a manifest: `parse`, a client-side apply and a server-side apply. `says` are
the words of our own rules, which all three use. Where the API server speaks before our rules do (types, lengths,
required fields), `server` has its words; where server-side apply already fails while it reads the manifest, `typed` has
the path and the words of that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.api.manifests import ABSENT, Manifest, aggregated, service

MODEL, ENGINE, SLO, TIERS = "spec.model", "spec.engine", "spec.slo", "spec.tiers"
DECODE = "spec.tiers.decode"
POD = "spec.tiers.decode.pod"


@dataclass(frozen=True)
class Case:
    """One broken manifest."""

    edits: dict[str, Any]
    path: str
    says: str
    server: str = ""
    typed: tuple[str, str] | None = None
    base: Callable[..., Manifest] = field(default=service)

    @property
    def name(self) -> str:
        """Names the case in a test's id: what is changed, and to what."""
        changed = ", ".join(
            f"{path}={'absent' if value is ABSENT else value!r:.40}" for path, value in self.edits.items()
        )
        return changed.replace("spec.", "")

    def manifest(self) -> Manifest:
        return self.base(**self.edits)


def one(path: str, value: Any, says: str, server: str = "", **more: Any) -> Case:
    """A case whose one changed field is the one at fault."""
    return Case({path: value}, more.pop("at", path), says, server, **more)


def _kind(path: str, value: Any, says: str, server: str, typed: str) -> Case:
    """A value of the wrong kind."""
    return one(path, value, says, server, typed=(path, typed))


NAMES = [
    one("metadata.name", "a" * 41, "must have at most 40 characters"),
    *[
        one("metadata.name", name, "must begin with a lower-case letter, end with a letter or digit")
        for name in ("1chat", "my.chat")
    ],
]

MODELS = [
    one(MODEL, ABSENT, "is required", "Required value"),
    one("spec.model.uri", ABSENT, "is required", "Required value"),
    one("spec.model.uri", "", "must not be empty", "should be at least 1 chars long"),
    one("spec.model.uri", "hf://a/" + "b" * 1024, "must have at most 1024 characters", "Too long"),
    *[
        one("spec.model.uri", f"{scheme}://bucket/model", f"has scheme {scheme}://, which is not supported yet")
        for scheme in ("s3", "gs", "oci")
    ],
    one("spec.model.uri", "ftp://host/model", "has unknown scheme ftp://; use hf://ORG/REPO"),
    one("spec.model.uri", "HF://Qwen/Qwen3-8B", "has unknown scheme HF://; use hf://ORG/REPO"),
    *[
        one("spec.model.uri", uri, "has no scheme; use hf://ORG/REPO, pvc://CLAIM/PATH or file:///PATH")
        for uri in ("Qwen/Qwen3-8B", "/models/chat", "hf:Qwen/Qwen3-8B", "hf")
    ],
    *[
        one("spec.model.uri", uri, "needs exactly an organisation and a repository: hf://ORG/REPO")
        for uri in (
            "hf://Qwen3-8B",
            "hf://Qwen/Qwen3/8B",
            "hf://Qwen/",
            "hf://",
            "hf://Qwen/..",
            "hf://-a/b",
            "hf://a/b\n",
        )
    ],
    *[
        one("spec.model.uri", uri, "needs a claim and a path in it, without '..': pvc://CLAIM/PATH")
        for uri in ("pvc://claim", "pvc://claim/", "pvc:///chat", "pvc://claim/../x", "pvc://Claim/x", "pvc://claim//x")
    ],
    *[
        one("spec.model.uri", uri, "needs an absolute path in the engine image, without '..': file:///PATH")
        for uri in ("file://models", "file:///", "file:///opt/../etc", "file:////x", "file:///a b")
    ],
    one("spec.model.name", "", "must not be empty", "should be at least 1 chars long"),
    one("spec.model.name", "a" * 254, "must have at most 253 characters", "Too long"),
    *[
        one("spec.model.name", name, "must begin with a letter or digit and have only letters, digits")
        for name in ("-chat", "my chat", "chat\n", "/chat", "chät")
    ],
    one("spec.model.revision", "", "must not be empty", "should be at least 1 chars long"),
    one("spec.model.revision", "r" * 254, "must have at most 253 characters", "Too long"),
    one("spec.model.revision", "--revision", "must be a branch, a tag or a commit"),
    Case(
        {"spec.model.uri": "pvc://claim/chat", "spec.model.revision": "main"},
        "spec.model.revision",
        "revision is only for hf:// models",
    ),
    Case(
        {"spec.model.uri": "file:///chat", "spec.model.secretRef": {"name": "token"}},
        "spec.model.secretRef",
        "secretRef is only for hf:// models",
    ),
    one("spec.model.secretRef", {}, "is required", "Required value", at="spec.model.secretRef.name"),
    one("spec.model.secretRef.name", "My_Secret", "must be the name of a Kubernetes object"),
    one(
        "spec.model.secretRef",
        {"name": "a", "key": ""},
        "must not be empty",
        "at least 1 chars",
        at="spec.model.secretRef.key",
    ),
    one(
        "spec.model.secretRef", {"name": "a", "key": "a/b"}, "must be a key of a Secret", at="spec.model.secretRef.key"
    ),
    Case(
        {"spec.model.cache": {"claimName": "cache", "sizeLimit": "1Gi"}},
        "spec.model.cache.sizeLimit",
        "claimName and sizeLimit exclude each other",
    ),
    one("spec.model.cache.claimName", "Cache", "must be the name of a Kubernetes object"),
    one("spec.model.cache.claimName", "", "must not be empty", "at least 1 chars"),
    *[
        one("spec.model.cache.sizeLimit", size, "must be a quantity above zero, such as 64Gi")
        for size in ("0", "-1Gi", "64GB", "much", "")
    ],
]

ENGINES = [
    one("spec.engine.image", "", "must not be empty", "should be at least 1 chars long"),
    one("spec.engine.image", "a" * 513, "must have at most 512 characters", "Too long"),
    *[
        one("spec.engine.image", image, "must be an image reference, such as registry.example.com/team/engine:1.0")
        for image in ("-x", "a b", "https://example.com/x y", "x@sha256:12")
    ],
    one("spec.engine.version", "", "must not be empty", "should be at least 1 chars long"),
    one("spec.engine.version", "v" * 129, "must have at most 128 characters", "Too long"),
    one("spec.engine.version", "1:0", "must be an image tag"),
    Case(
        {"spec.engine.image": "example.com/x:1", "spec.engine.version": "1"},
        "spec.engine.version",
        "image and version exclude each other",
    ),
    one("spec.engine.args", ["--x"] * 129, "must have at most 128 entries", "Too many"),
    one("spec.engine.args", [""], "must not be empty", "should be at least 1 chars long", at="spec.engine.args[0]"),
    one("spec.engine.args", ["x" * 4097], "must have at most 4096 characters", "Too long", at="spec.engine.args[0]"),
    *[
        one("spec.engine.args", ["--seed", "1", arg], "is set by Plimsoll", at="spec.engine.args[2]")
        for arg in (
            "--host",
            "--port=80",
            "--model",
            "--served-model-name",
            "--served_model_name=x",
            "--revision=x",
            "--kv-transfer-config.kv_role=x",
            "--kv-transfer-config={}",
            "--middleware",
            "--shutdown-timeout",
            "--ssl-keyfile",
            "--ssl-certfile",
            "--root-path",
            "--api-key=x",
            "--headless",
            "--uds",
        )
    ],
    one("spec.engine.args", ["--seed 1"], "has a flag and its value in one item", at="spec.engine.args[0]"),
    one(
        "spec.engine.env",
        [{"name": f"A{i}", "value": ""} for i in range(129)],
        "must have at most 128 entries",
        "Too many",
    ),
    Case(
        {"spec.engine.env": [{"value": "x"}]},
        "spec.engine.env[0].name",
        "is required",
        "Required value",
        ("spec.engine.env", "omits all key fields"),
    ),
    Case(
        {"spec.engine.env": [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]},
        "spec.engine.env[1]",
        "A is there twice",
        "Duplicate value",
        ("spec.engine.env", "duplicate entries"),
    ),
    one(
        "spec.engine.env",
        [{"name": "", "value": "x"}],
        "must not be empty",
        "at least 1 chars",
        at="spec.engine.env[0].name",
    ),
    one("spec.engine.env", [{"name": "A=B", "value": "x"}], "must be a variable's name", at="spec.engine.env[0].name"),
    one("spec.engine.env", [{"name": "9A", "value": "x"}], "must be a variable's name", at="spec.engine.env[0].name"),
    one(
        "spec.engine.env",
        [{"name": "PLIMSOLL_ROLE", "value": "x"}],
        "names that begin with PLIMSOLL_",
        at="spec.engine.env[0].name",
    ),
    one("spec.engine.env", [{"name": "A"}], "needs exactly one of value and valueFrom", at="spec.engine.env[0]"),
    one(
        "spec.engine.env",
        [{"name": "A", "value": "x", "valueFrom": {"secretKeyRef": {"name": "a", "key": "b"}}}],
        "needs exactly one of value and valueFrom",
        at="spec.engine.env[0]",
    ),
    one(
        "spec.engine.env",
        [{"name": "A", "value": "x" * 32769}],
        "must have at most 32768",
        "Too long",
        at="spec.engine.env[0].value",
    ),
    one(
        "spec.engine.env",
        [{"name": "A", "valueFrom": {}}],
        "needs exactly one of secretKeyRef and configMapKeyRef",
        at="spec.engine.env[0].valueFrom",
    ),
    one(
        "spec.engine.env",
        [{"name": "A", "valueFrom": {ref: {"name": "a", "key": "b"} for ref in ("secretKeyRef", "configMapKeyRef")}}],
        "needs exactly one of secretKeyRef and configMapKeyRef",
        at="spec.engine.env[0].valueFrom",
    ),
    *[
        one(
            "spec.engine.env",
            [{"name": "A", "valueFrom": {ref: {"name": "A_b", "key": "b"}}}],
            "must be the name of a Kubernetes object",
            at=f"spec.engine.env[0].valueFrom.{ref}.name",
        )
        for ref in ("secretKeyRef", "configMapKeyRef")
    ],
    *[
        one(
            "spec.engine.env",
            [{"name": "A", "valueFrom": {ref: {"name": "a"}}}],
            "is required",
            "Required value",
            at=f"spec.engine.env[0].valueFrom.{ref}.key",
        )
        for ref in ("secretKeyRef", "configMapKeyRef")
    ],
    one(
        "spec.engine.env",
        [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "a", "key": "b c"}}}],
        "must be a key",
        at="spec.engine.env[0].valueFrom.secretKeyRef.key",
    ),
]

PROMISES = [
    one(SLO, {}, "needs ttft or tpot"),
    one(SLO, {"percentile": 99}, "needs ttft or tpot"),
    one(
        SLO,
        {"ttft": "1s", "percentile": 0},
        "must be at least 1",
        "greater than or equal to 1",
        at="spec.slo.percentile",
    ),
    one(
        SLO,
        {"ttft": "1s", "percentile": 100},
        "must be at most 99",
        "less than or equal to 99",
        at="spec.slo.percentile",
    ),
    *[
        one(f"spec.slo.{name}", value, "must be a duration with a unit (us, ms, s, m, h), such as 500ms or 1.5s")
        for name in ("ttft", "tpot")
        for value in ("500", "half a second", "-1s", "1 s", "", ".5s", "1.s", "1d")
    ],
    *[
        one(f"spec.slo.{name}", value, "must be longer than zero and at most one hour")
        for name in ("ttft", "tpot")
        for value in ("0s", "0.0ms", "61m", "3600.1s")
    ],
    one("spec.slo.ttft", "1" * 40 + "s", "must have at most 32 characters", "Too long"),
]

SHAPES = [
    one(TIERS, ABSENT, "is required", "Required value"),
    one(TIERS, {}, "has no tier: write either serve alone, or prefill and decode"),
    one(TIERS, {"prefill": {}}, "has prefill alone: write either"),
    one(TIERS, {"decode": {}}, "has decode alone: write either"),
    one(TIERS, {"prefill": {}, "serve": {}}, "has prefill and serve: write either"),
    one(TIERS, {"decode": {}, "serve": {}}, "has decode and serve: write either"),
    one(TIERS, {"prefill": {}, "decode": {}, "serve": {}}, "has prefill, decode and serve: write either"),
]


def sizes(tier: str) -> list[Case]:
    """The numbers of one tier: every tier is tried, since each has a copy of the rules in the CRD."""
    base = aggregated if tier == "serve" else service
    at = f"spec.tiers.{tier}"
    return [
        one(f"{at}.minReplicas", 0, "must be at least 1", "greater than or equal to 1", base=base),
        one(f"{at}.minReplicas", 1001, "must be at most 1000", "less than or equal to 1000", base=base),
        one(f"{at}.maxReplicas", 0, "must be at least 1", "greater than or equal to 1", base=base),
        one(f"{at}.maxReplicas", 1001, "must be at most 1000", "less than or equal to 1000", base=base),
        Case(
            {f"{at}.minReplicas": 3, f"{at}.maxReplicas": 2},
            f"{at}.maxReplicas",
            "maxReplicas must not be below minReplicas",
            base=base,
        ),
        one(f"{at}.gpus", -1, "must be at least 0", "greater than or equal to 0", base=base),
        one(f"{at}.gpus", 65, "must be at most 64", "less than or equal to 64", base=base),
        *[
            one(
                f"{at}.gpuResource",
                name,
                "must be an extended resource: DOMAIN/NAME, such as nvidia.com/gpu",
                base=base,
            )
            for name in ("gpu", "Nvidia.com/gpu", "nvidia.com/", "nvidia.com/gpu/x", "/gpu")
        ],
        one(f"{at}.gpuResource", "a/" + "b" * 252, "must have at most 253 characters", "Too long", base=base),
        *[
            one(f"{at}.rollout.{name}", value, "must be a number of pods from 0 to 1000, or a percentage", base=base)
            for name in ("maxSurge", "maxUnavailable")
            for value in (-1, 1001, "1", "101%", "-1%", "%", "1.5%")
        ],
        *[
            Case(
                {f"{at}.rollout": {"maxSurge": surge, "maxUnavailable": unavailable}},
                f"{at}.rollout.maxUnavailable",
                "maxSurge and maxUnavailable must not both be 0",
                base=base,
            )
            for surge, unavailable in ((0, 0), ("0%", 0), (0, "0%"), ("00%", "0%"))
        ],
        one(f"{at}.rollout.maxSurge", 0, "must not both be 0", at=f"{at}.rollout.maxUnavailable", base=base),
        one(f"{at}.rollout.maxSurge", "1" * 9, "must have at most 8 characters", "Too long", base=base),
    ]


TIER_NUMBERS = [case for tier in ("prefill", "decode", "serve") for case in sizes(tier)]

SPEC_CASES = [*NAMES, *MODELS, *ENGINES, *PROMISES, *SHAPES, *TIER_NUMBERS]
