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
TOO_MANY_DIGITS = "1" * 33
MODEL, SLO, TIERS = "spec.model", "spec.slo", "spec.tiers"
DECODE = "spec.tiers.decode"
POD = "spec.tiers.decode.pod"
OBJECT_NAME = "must be the name of a Kubernetes object"


@dataclass(frozen=True)
class Case:
    """One broken manifest."""

    edits: dict[str, Any]
    path: str
    message: str
    server_message: str = ""
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


def single_edit(path: str, value: Any, says: str, server: str = "", **more: Any) -> Case:
    """A case whose one changed field is the one at fault."""
    return Case({path: value}, more.pop("at", path), says, server, **more)


def text_cases(
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
    empty = single_edit(path, build(""), "must not be empty", "should be at least 1 chars long", at=at, base=base)
    long = single_edit(
        path, build("a" * (longest + 1)), f"must have at most {longest} characters", "Too long", at=at, base=base
    )
    return [
        *([] if may_be_empty else [empty]),
        long,
        *[single_edit(path, build(value), says, at=at, base=base) for value in wrong],
    ]


NAMES = [
    single_edit("metadata.name", "a" * 41, "must have at most 40 characters"),
    *[
        single_edit("metadata.name", name, "must begin with a lower-case letter, end with a letter or digit")
        for name in ("1chat", "my.chat")
    ],
]

MODELS = [
    single_edit(MODEL, ABSENT, "is required", "Required value"),
    single_edit("spec.model.uri", ABSENT, "is required", "Required value"),
    single_edit("spec.model.uri", "", "must not be empty", "should be at least 1 chars long"),
    single_edit("spec.model.uri", "hf://a/" + "b" * 1024, "must have at most 1024 characters", "Too long"),
    *[
        single_edit("spec.model.uri", uri, "must have a bucket and a folder in it, without '..': ")
        for uri in ("s3://", "s3://a", "s3://Bucket/x", "s3://bucket//x", "gs://bucket/../x", "gs://bucket/a b")
    ],
    *[
        single_edit("spec.model.uri", uri, "must be an archive, without user and query: https://HOST/PATH.tar")
        for uri in ("https://host/chat", "https://a:b@host/x.tar", "https://host/x.tar?y", "https://host/../x.tgz")
    ],
    *[
        single_edit("spec.model.uri", uri, "must have a registry, a repository, and a tag or digest: oci://")
        for uri in ("oci://host/chat", "oci://chat:1", "oci://host/Chat:1", "oci://host/chat@sha256:ab", "oci://")
    ],
    single_edit("spec.model.uri", "ftp://host/model", "has unknown scheme ftp://; use hf://ORG/REPO"),
    single_edit("spec.model.uri", "HF://Qwen/Qwen3-8B", "has unknown scheme HF://; use hf://ORG/REPO"),
    *[
        single_edit(
            "spec.model.uri", uri, "has no scheme; use hf://ORG/REPO, pvc://CLAIM/PATH, file:///PATH, s3://BUCKET/PATH"
        )
        for uri in ("Qwen/Qwen3-8B", "/models/chat", "hf:Qwen/Qwen3-8B", "hf")
    ],
    *[
        single_edit("spec.model.uri", uri, "must have exactly an organisation and a repository: hf://ORG/REPO")
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
        single_edit("spec.model.uri", uri, "must have a claim and a path in it, without '..': pvc://CLAIM/PATH")
        for uri in ("pvc://claim", "pvc://claim/", "pvc:///chat", "pvc://claim/../x", "pvc://Claim/x", "pvc://claim//x")
    ],
    *[
        single_edit("spec.model.uri", uri, "must have an absolute path in the engine image, without '..': file:///PATH")
        for uri in ("file://models", "file:///", "file:///opt/../etc", "file:////x", "file:///a b")
    ],
    *text_cases(
        "spec.model.name",
        253,
        "must begin with a letter or digit and have only letters, digits",
        ("-chat", "my chat", "chat\n", "/chat", "chät"),
    ),
    *text_cases("spec.model.revision", 253, "must be a branch, a tag or a commit", ("--revision", "a b", "main\n")),
    *[
        single_edit(
            "spec.model.task", task, "must be 'generate', 'embed', 'score' or 'transcribe'", "Unsupported value"
        )
        for task in ("embedding", "Generate", "")
    ],
    *[
        single_edit("spec.model.task", task, "task needs the tier serve unless it is generate")
        for task in ("embed", "score", "transcribe")
    ],
    Case(
        {"spec.model.uri": "pvc://claim/chat", "spec.model.revision": "main"},
        "spec.model.revision",
        "revision is allowed only for hf:// models",
    ),
    Case(
        {"spec.model.uri": "file:///chat", "spec.model.secretRef": {"name": "token"}},
        "spec.model.secretRef",
        "secretRef is allowed only for hf://, s3://, gs:// and https:// models; oci:// uses pod.imagePullSecrets",
    ),
    Case(
        {"spec.model.digest": "sha256:" + "0" * 64},
        "spec.model.digest",
        "digest is allowed only for s3://, gs:// and https:// models; oci:// has it in the URI",
    ),
    Case(
        {"spec.model.uri": "s3://models/chat", "spec.model.digest": "sha256:" + "0" * 65},
        "spec.model.digest",
        "must have at most 71 characters, not 72",
        "Too long",
    ),
    *[
        Case({"spec.model.uri": "oci://ghcr.io/team/chat:1", "spec.model.path": path}, "spec.model.path", *says)
        for path, says in (
            ("", ("must not be empty", "should be at least 1 chars long")),
            ("a" * 254, ("must have at most 253 characters, not 254", "Too long")),
        )
    ],
    Case({"spec.model.path": "models"}, "spec.model.path", "path is allowed only for oci:// models"),
    *[
        Case(
            {"spec.model.uri": "s3://models/chat", "spec.model.digest": digest},
            "spec.model.digest",
            "must be sha256: and 64 digits of 0-9 and a-f",
        )
        for digest in ("sha256:ab", "md5:" + "0" * 64, "sha256:" + "A" * 64)
    ],
    *[
        Case(
            {"spec.model.uri": "oci://ghcr.io/team/chat:1", "spec.model.path": path},
            "spec.model.path",
            "must be a relative path without '..'",
        )
        for path in ("/models", "../models", "models/")
    ],
    single_edit("spec.model.secretRef", {}, "is required", "Required value", at="spec.model.secretRef.name"),
    *text_cases("spec.model.secretRef.name", 253, OBJECT_NAME, ("My_Secret",)),
    *text_cases(
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
        "claimName and sizeLimit are mutually exclusive",
    ),
    *text_cases("spec.model.cache.claimName", 253, OBJECT_NAME, ("Cache",)),
    *[
        Case(
            {"spec.model.cache": {"hostPath": "/models", **other}},
            "spec.model.cache.hostPath",
            "hostPath excludes claimName and sizeLimit",
        )
        for other in ({"claimName": "cache"}, {"sizeLimit": "1Gi"})
    ],
    *[
        Case(
            {"spec.model.cache": {"nodeLocal": True, **other}},
            "spec.model.cache.nodeLocal",
            "nodeLocal excludes claimName, hostPath and sizeLimit",
        )
        for other in ({"claimName": "cache"}, {"sizeLimit": "1Gi"}, {"hostPath": "/models"})
    ],
    *[
        Case(
            {"spec.model": {"uri": uri, "cache": {"nodeLocal": True}}},
            "spec.model.cache.nodeLocal",
            "nodeLocal is allowed only for hf://, s3://, gs:// and https:// models",
        )
        for uri in ("pvc://models/a", "file:///models/a", "oci://a/b:c")
    ],
    *text_cases(
        "spec.model.cache.hostPath",
        253,
        "must be an absolute path without '..'",
        ("models", "/", "/models/", "/models/../etc", "/a b"),
    ),
    *text_cases(
        "spec.model.cache.sizeLimit",
        32,
        "must be a quantity above zero, such as 64Gi",
        ("0", "-1Gi", "64GB", "much", ""),
        may_be_empty=True,
    ),
]

ENGINES = [
    *[
        single_edit(
            "spec.engine.runtime",
            runtime,
            "must be 'vllm', 'simulated', ",
            "Unsupported value",
        )
        for runtime in ("triton", "VLLM", "")
    ],
    *text_cases(
        "spec.engine.image",
        512,
        "must be an image reference, such as registry.example.com/team/engine:1.0",
        ("-x", "a b", "https://example.com/x y", "x@sha256:12"),
    ),
    *text_cases("spec.engine.version", 128, "must be an image tag", ("1:0", "-1", "a/b")),
    *[single_edit("spec.engine.drainTimeout", value, DURATION) for value in BAD_DURATIONS],
    *[
        single_edit("spec.engine.drainTimeout", value, "must be from 5 seconds to 24 hours")
        for value in ("0s", "4s", "1ms", "24h1s")
    ],
    *[
        single_edit("spec.engine.drainTimeout", value, "must be in whole seconds, such as 90s or 1h30m")
        for value in ("7.5s", "1m500ms", "0.5h")
    ],
    single_edit("spec.engine.drainTimeout", TOO_MANY_DIGITS, "must have at most 32 characters", "Too long"),
    Case(
        {"spec.engine.image": "example.com/x:1", "spec.engine.version": "1"},
        "spec.engine.version",
        "image and version are mutually exclusive",
    ),
    single_edit("spec.engine.args", ["--x"] * 129, "must have at most 128 entries", "Too many"),
    *text_cases("spec.engine.args", 4096, at="spec.engine.args[0]", build=lambda arg: [arg]),
    *[
        single_edit(
            "spec.engine.args", ["--seed", "1", arg], "may not have a flag that Plimsoll sets (reserved: --host, "
        )
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
    single_edit("spec.engine.args", ["--seed 1"], "has a flag and its value in one item", at="spec.engine.args[0]"),
]


def _variable(variable: dict[str, Any], field: str, says: str, server: str = "") -> Case:
    return single_edit("spec.engine.env", [variable], says, server, at=f"spec.engine.env[0]{field}")


def _key_refs(ref: str) -> list[Case]:
    at = f"spec.engine.env[0].valueFrom.{ref}"

    def variable(key_ref: dict[str, str]) -> list[dict[str, Any]]:
        return [{"name": "A", "valueFrom": {ref: key_ref}}]

    return [
        single_edit("spec.engine.env", variable({"key": "b"}), "is required", "Required value", at=f"{at}.name"),
        single_edit("spec.engine.env", variable({"name": "a"}), "is required", "Required value", at=f"{at}.key"),
        *text_cases(
            "spec.engine.env",
            253,
            OBJECT_NAME,
            ("A_b",),
            at=f"{at}.name",
            build=lambda name: variable({"name": name, "key": "b"}),
        ),
        *text_cases(
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
    single_edit(
        "spec.engine.env", [{"name": f"A{i}", "value": ""} for i in range(129)], "must have at most 128", "Too many"
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
        "A is listed twice",
        "Duplicate value",
        ("spec.engine.env", "duplicate entries"),
    ),
    *text_cases(
        "spec.engine.env",
        253,
        "must be the name of an environment variable",
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

SLOS = [
    single_edit(SLO, {}, "needs ttft, tpot or e2e"),
    single_edit(SLO, {"percentile": 99}, "needs ttft, tpot or e2e"),
    single_edit(SLO, {"itl": "40ms"}, "needs ttft, tpot or e2e"),
    single_edit(
        SLO,
        {"ttft": "1s", "percentile": 0},
        "must be at least 1",
        "greater than or equal to 1",
        at="spec.slo.percentile",
    ),
    single_edit(
        SLO,
        {"ttft": "1s", "percentile": 100},
        "must be at most 99",
        "less than or equal to 99",
        at="spec.slo.percentile",
    ),
    *[
        single_edit(
            f"spec.slo.{name}", value, "must be a duration with a unit (us, ms, s, m, h), such as 500ms or 1.5s"
        )
        for name in ("ttft", "tpot", "e2e", "itl")
        for value in ("500", "half a second", "-1s", "1 s", "", ".5s", "1.s", "1d")
    ],
    *[
        single_edit(f"spec.slo.{name}", value, "must be longer than zero and at most one hour")
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
        "ttftPerKToken needs ttft, to which it is added",
    ),
    *[
        Case({SLO: {"ttft": ttft, "e2e": e2e}}, "spec.slo.e2e", "e2e must be longer than ttft, because it includes it")
        for ttft, e2e in (("1s", "1s"), ("1s", "1000ms"), ("1h", "59m59.999s"), ("500ms", "1ns"), ("0.5s", "500000us"))
    ],
    Case({SLO: {"ttft": "soon", "e2e": "1s"}}, "spec.slo.ttft", "must be a duration with a unit"),
    Case({SLO: {"e2e": "20s", "ttftPerKToken": "1s"}}, "spec.slo.ttftPerKToken", "ttftPerKToken needs ttft"),
    Case({SLO: {"e2e": "20s"}}, "spec.slo.ttft", "ttft is required with e2e if there is a prefill tier"),
    Case({SLO: {"e2e": "20s", "tpot": "1s"}}, "spec.slo.ttft", "ttft is required with e2e if there is a prefill"),
    *text_cases("spec.slo.ttft", 32, may_be_empty=True, build=lambda digits: f"{len(digits) * '1'}s"),
    *text_cases("spec.slo.tpot", 32, may_be_empty=True, build=lambda digits: f"{len(digits) * '1'}s"),
    *[
        Case({SLO: {"ttft": "1s", name: "1" * 33}}, f"spec.slo.{name}", "must have at most 32", "Too long")
        for name in ("e2e", "itl")
    ],
]

SHAPES = [
    single_edit(TIERS, ABSENT, "is required", "Required value"),
    single_edit(TIERS, {}, "has no tier: use either serve alone, or prefill and decode"),
    single_edit(TIERS, {"prefill": {}}, "has prefill alone: use either"),
    single_edit(TIERS, {"decode": {}}, "has decode alone: use either"),
    single_edit(TIERS, {"prefill": {}, "serve": {}}, "has prefill and serve: use either"),
    single_edit(TIERS, {"decode": {}, "serve": {}}, "has decode and serve: use either"),
    single_edit(TIERS, {"prefill": {}, "decode": {}, "serve": {}}, "has prefill, decode and serve: use either"),
]


def sizes(tier: str) -> list[Case]:
    """The numbers of one tier: every tier is tried, since each has a copy of the rules in the CRD."""
    base = aggregated if tier == "serve" else service
    at = f"spec.tiers.{tier}"
    return [
        single_edit(f"{at}.minReplicas", -1, "must be at least 0", "greater than or equal to 0", base=base),
        single_edit(f"{at}.minReplicas", 1001, "must be at most 1000", "less than or equal to 1000", base=base),
        single_edit(f"{at}.maxReplicas", 0, "must be at least 1", "greater than or equal to 1", base=base),
        single_edit(f"{at}.maxReplicas", 1001, "must be at most 1000", "less than or equal to 1000", base=base),
        Case(
            {f"{at}.minReplicas": 3, f"{at}.maxReplicas": 2},
            f"{at}.maxReplicas",
            "maxReplicas must not be below minReplicas",
            base=base,
        ),
        single_edit(f"{at}.gpus", -1, "must be at least 0", "greater than or equal to 0", base=base),
        single_edit(f"{at}.gpus", 65, "must be at most 64", "less than or equal to 64", base=base),
        single_edit(f"{at}.nodes", 0, "must be at least 1", "greater than or equal to 1", base=base),
        single_edit(f"{at}.nodes", 17, "must be at most 16", "less than or equal to 16", base=base),
        single_edit(
            f"{at}.exclusiveTopology",
            "example.com/rack",
            "exclusiveTopology is allowed only with nodes above 1",
            base=base,
        ),
        *[
            single_edit(
                f"{at}.gpuResource",
                name,
                "must be an extended resource of the form DOMAIN/NAME, such as nvidia.com/gpu",
                base=base,
            )
            for name in ("gpu", "Nvidia.com/gpu", "nvidia.com/", "nvidia.com/gpu/x", "/gpu")
        ],
        single_edit(f"{at}.gpuResource", "a/" + "b" * 252, "must have at most 253 characters", "Too long", base=base),
        *[
            single_edit(
                f"{at}.rollout.{name}", value, "must be a number of pods from 0 to 1000, or a percentage", base=base
            )
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
        single_edit(f"{at}.rollout.maxSurge", 0, "must not both be 0", at=f"{at}.rollout.maxUnavailable", base=base),
        *text_cases(f"{at}.rollout.maxSurge", 8, may_be_empty=True, base=base),
        *text_cases(f"{at}.rollout.maxUnavailable", 8, may_be_empty=True, base=base),
    ]


TIER_NUMBERS = [case for tier in ("prefill", "decode", "serve") for case in sizes(tier)]

SPEC_CASES = [*NAMES, *MODELS, *ENGINES, *ENVIRONMENTS, *SLOS, *SHAPES, *TIER_NUMBERS]
