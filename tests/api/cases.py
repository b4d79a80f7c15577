"""Every constraint of the API, broken once or more: what is changed, which field is blamed, and in what words.

One table for the three places that judge a manifest: `parse`, a client-side apply and a server-side apply. `says` are
the words of our own rules, which all three use. Where the API server speaks before our rules do (types, lengths,
required fields), `server` has its words; where server-side apply already fails while it reads the manifest, `typed` has
the path and the words of that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.api.manifests import ABSENT, Manifest, aggregated, service

DURATION = "must be a duration with a unit (us, ms, s, m, h), such as 500ms or 1.5s"
BAD_DURATIONS = ("60", "five minutes", "-1m", "1 m", "", "1d", ".5s")
LONG = "1" * 33
MODEL, SLO, TIERS = "spec.model", "spec.slo", "spec.tiers"
DECODE = "spec.tiers.decode"
POD = "spec.tiers.decode.pod"
OBJECT_NAME = "must be the name of a Kubernetes object"


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


def text(
    path: str,
    longest: int,
    says: str = "",
    wrong: Sequence[str] = (),
    *,
    at: str = "",
    build: Callable[[str], Any] = str,
    may_be_empty: bool = False,
    base: Callable[..., Manifest] = service,
) -> list[Case]:
    """Text that is empty, too long, or wrong in a way that `says` tells; `build` puts it into the value of `path`."""
    at = at or path
    empty = one(path, build(""), "must not be empty", "should be at least 1 chars long", at=at, base=base)
    long = one(
        path, build("a" * (longest + 1)), f"must have at most {longest} characters", "Too long", at=at, base=base
    )
    return [
        *([] if may_be_empty else [empty]),
        long,
        *[one(path, build(value), says, at=at, base=base) for value in wrong],
    ]


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
    *text(
        "spec.model.name",
        253,
        "must begin with a letter or digit and have only letters, digits",
        ("-chat", "my chat", "chat\n", "/chat", "chät"),
    ),
    *text("spec.model.revision", 253, "must be a branch, a tag or a commit", ("--revision", "a b", "main\n")),
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
    *text("spec.model.secretRef.name", 253, OBJECT_NAME, ("My_Secret",)),
    *text(
        "spec.model.secretRef",
        253,
        "must be a key of a Secret",
        ("a/b",),
        at="spec.model.secretRef.key",
        build=lambda key: {"name": "a", "key": key},
    ),
    Case(
        {"spec.model.cache": {"claimName": "cache", "sizeLimit": "1Gi"}},
        "spec.model.cache.sizeLimit",
        "claimName and sizeLimit exclude each other",
    ),
    *text("spec.model.cache.claimName", 253, OBJECT_NAME, ("Cache",)),
    *text(
        "spec.model.cache.sizeLimit",
        32,
        "must be a quantity above zero, such as 64Gi",
        ("0", "-1Gi", "64GB", "much", ""),
        may_be_empty=True,
    ),
]

ENGINES = [
    *[
        one("spec.engine.runtime", runtime, "must be 'vllm' or 'simulated'", "Unsupported value")
        for runtime in ("sglang", "VLLM", "")
    ],
    *text(
        "spec.engine.image",
        512,
        "must be an image reference, such as registry.example.com/team/engine:1.0",
        ("-x", "a b", "https://example.com/x y", "x@sha256:12"),
    ),
    *text("spec.engine.version", 128, "must be an image tag", ("1:0", "-1", "a/b")),
    *[one("spec.engine.drainTimeout", value, DURATION) for value in BAD_DURATIONS],
    *[
        one("spec.engine.drainTimeout", value, "must be from 5 seconds to 24 hours")
        for value in ("0s", "4s", "1ms", "24h1s")
    ],
    *[
        one("spec.engine.drainTimeout", value, "must be in whole seconds, such as 90s or 1h30m")
        for value in ("7.5s", "1m500ms", "0.5h")
    ],
    one("spec.engine.drainTimeout", LONG, "must have at most 32 characters", "Too long"),
    Case(
        {"spec.engine.image": "example.com/x:1", "spec.engine.version": "1"},
        "spec.engine.version",
        "image and version exclude each other",
    ),
    one("spec.engine.args", ["--x"] * 129, "must have at most 128 entries", "Too many"),
    *text("spec.engine.args", 4096, at="spec.engine.args[0]", build=lambda arg: [arg]),
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
]


def _variable(variable: dict[str, Any], field: str, says: str, server: str = "") -> Case:
    return one("spec.engine.env", [variable], says, server, at=f"spec.engine.env[0]{field}")


def _key_refs(ref: str) -> list[Case]:
    at = f"spec.engine.env[0].valueFrom.{ref}"

    def variable(key_ref: dict[str, str]) -> list[dict[str, Any]]:
        return [{"name": "A", "valueFrom": {ref: key_ref}}]

    return [
        one("spec.engine.env", variable({"key": "b"}), "is required", "Required value", at=f"{at}.name"),
        one("spec.engine.env", variable({"name": "a"}), "is required", "Required value", at=f"{at}.key"),
        *text(
            "spec.engine.env",
            253,
            OBJECT_NAME,
            ("A_b",),
            at=f"{at}.name",
            build=lambda name: variable({"name": name, "key": "b"}),
        ),
        *text(
            "spec.engine.env",
            253,
            "must be a key",
            ("b c", "b/c"),
            at=f"{at}.key",
            build=lambda key: variable({"name": "a", "key": key}),
        ),
    ]


_ONE_REF = {"name": "a", "key": "b"}
_TWO_SOURCES = "needs exactly one of secretKeyRef and configMapKeyRef"

ENVIRONMENTS = [
    one("spec.engine.env", [{"name": f"A{i}", "value": ""} for i in range(129)], "must have at most 128", "Too many"),
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
    *text(
        "spec.engine.env",
        253,
        "must be a variable's name",
        ("A=B", "9A", "A B"),
        at="spec.engine.env[0].name",
        build=lambda name: [{"name": name, "value": "x"}],
    ),
    _variable({"name": "PLIMSOLL_ROLE", "value": "x"}, ".name", "is reserved: names that begin with PLIMSOLL_"),
    _variable({"name": "A", "value": "x" * 32769}, ".value", "must have at most 32768", "Too long"),
    _variable({"name": "A"}, "", "needs exactly one of value and valueFrom"),
    _variable(
        {"name": "A", "value": "x", "valueFrom": {"secretKeyRef": _ONE_REF}},
        "",
        "needs exactly one of value and valueFrom",
    ),
    _variable({"name": "A", "valueFrom": {}}, ".valueFrom", _TWO_SOURCES),
    _variable(
        {"name": "A", "valueFrom": {"secretKeyRef": _ONE_REF, "configMapKeyRef": _ONE_REF}}, ".valueFrom", _TWO_SOURCES
    ),
    *_key_refs("secretKeyRef"),
    *_key_refs("configMapKeyRef"),
]

PROMISES = [
    one(SLO, {}, "needs ttft, tpot or e2e"),
    one(SLO, {"percentile": 99}, "needs ttft, tpot or e2e"),
    one(SLO, {"itl": "40ms"}, "needs ttft, tpot or e2e"),
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
        for name in ("ttft", "tpot", "e2e", "itl")
        for value in ("500", "half a second", "-1s", "1 s", "", ".5s", "1.s", "1d")
    ],
    *[
        one(f"spec.slo.{name}", value, "must be longer than zero and at most one hour")
        for name in ("ttft", "tpot", "e2e", "itl")
        for value in ("0s", "0.0ms", "0.9ns", "61m", "3600.1s")
    ],
    *[
        Case({SLO: {"ttft": "1s", "ttftPerKToken": value}}, "spec.slo.ttftPerKToken", "must be a duration with a unit")
        for value in ("100", "-1ms", "", "fast", "1ms per token")
    ],
    *[
        Case({SLO: {"ttft": "1s", "ttftPerKToken": value}}, "spec.slo.ttftPerKToken", "must be at most one hour")
        for value in ("1h1ns", "61m")
    ],
    Case(
        {SLO: {"ttft": "1s", "ttftPerKToken": "1" * 33}}, "spec.slo.ttftPerKToken", "must have at most 32", "Too long"
    ),
    Case(
        {SLO: {"tpot": "50ms", "ttftPerKToken": "100ms"}},
        "spec.slo.ttftPerKToken",
        "ttftPerKToken is added to ttft, which is missing",
    ),
    *[
        Case({SLO: {"ttft": ttft, "e2e": e2e}}, "spec.slo.e2e", "e2e must be longer than ttft, which is a part of it")
        for ttft, e2e in (("1s", "1s"), ("1s", "1000ms"), ("1h", "59m59.999s"), ("500ms", "1ns"), ("0.5s", "500000us"))
    ],
    Case({SLO: {"ttft": "soon", "e2e": "1s"}}, "spec.slo.ttft", "must be a duration with a unit"),
    Case({SLO: {"e2e": "20s", "ttftPerKToken": "1s"}}, "spec.slo.ttftPerKToken", "ttftPerKToken is added to ttft"),
    Case({SLO: {"e2e": "20s"}}, "spec.slo.ttft", "ttft is needed beside e2e where there is a prefill tier"),
    Case({SLO: {"e2e": "20s", "tpot": "1s"}}, "spec.slo.ttft", "ttft is needed beside e2e where there is a prefill"),
    *text("spec.slo.ttft", 32, may_be_empty=True, build=lambda digits: f"{len(digits) * '1'}s"),
    *text("spec.slo.tpot", 32, may_be_empty=True, build=lambda digits: f"{len(digits) * '1'}s"),
    *[
        Case({SLO: {"ttft": "1s", name: "1" * 33}}, f"spec.slo.{name}", "must have at most 32", "Too long")
        for name in ("e2e", "itl")
    ],
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
        one(f"{at}.minReplicas", -1, "must be at least 0", "greater than or equal to 0", base=base),
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
        *text(f"{at}.rollout.maxSurge", 8, may_be_empty=True, base=base),
        *text(f"{at}.rollout.maxUnavailable", 8, may_be_empty=True, base=base),
    ]


TIER_NUMBERS = [case for tier in ("prefill", "decode", "serve") for case in sizes(tier)]

SPEC_CASES = [*NAMES, *MODELS, *ENGINES, *ENVIRONMENTS, *PROMISES, *SHAPES, *TIER_NUMBERS]
