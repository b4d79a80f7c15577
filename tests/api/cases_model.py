"""Constraints on the name of a service and on its model, each broken once or more; see `cases`."""

from __future__ import annotations

from tests.api.cases import (
    MODEL,
    OBJECT_NAME,
    Case,
    single_edit,
    text_cases,
)
from tests.api.manifests import ABSENT

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

MODEL_CASES = [*NAMES, *MODELS]
