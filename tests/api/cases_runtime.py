"""Constraints on the engine's image, arguments and environment, each broken once or more; see `cases`."""

from __future__ import annotations

from typing import Any

from tests.api.cases import (
    BAD_DURATIONS,
    DURATION,
    OBJECT_NAME,
    TOO_MANY_DIGITS,
    Case,
    single_edit,
    text_cases,
)

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

RUNTIME_CASES = [*ENGINES, *ENVIRONMENTS]
