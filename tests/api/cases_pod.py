"""Constraints on a tier's pod overrides, broken; see `cases`."""

from __future__ import annotations

from typing import Any

from tests.api.cases import DECODE, OBJECT_NAME, POD, Case, single_edit, text_cases

LABEL = "must be a label value"
KEY = "every key must be a name such as example.com/pool"
SET_BY_PLIMSOLL = "are set by Plimsoll"

METADATA = [
    *[
        single_edit(f"{POD}.{place}", {key: "x"}, KEY)
        for place in ("nodeSelector", "labels", "annotations")
        for key in ("-a", "a/b/c", "Example.com/a", "a b", "")
    ],
    *[
        single_edit(f"{POD}.{place}", {"a": value}, LABEL, at=f"{POD}.{place}.a")
        for place in ("nodeSelector", "labels")
        for value in ("-a", "a b", "a/b")
    ],
    *[
        single_edit(
            f"{POD}.{place}", {"a": "x" * 64}, "must have at most 63 characters", "Too long", at=f"{POD}.{place}.a"
        )
        for place in ("nodeSelector", "labels")
    ],
    *[
        single_edit(f"{POD}.{place}", {f"a{i}": "x" for i in range(65)}, "must have at most", "Too many")
        for place in ("nodeSelector", "labels", "annotations")
    ],
    single_edit(
        f"{POD}.annotations", {"a": "x" * 16385}, "must have at most 16384", "Too long", at=f"{POD}.annotations.a"
    ),
    *[
        single_edit(f"{POD}.{place}", {key: "x"}, SET_BY_PLIMSOLL)
        for place in ("labels", "annotations")
        for key in ("plimsoll.dev/role", "plimsoll.dev/x", "app.kubernetes.io/name", "app.kubernetes.io/instance")
    ],
]

NAMES = [
    case
    for place in ("runtimeClassName", "priorityClassName", "schedulerName", "serviceAccountName")
    for case in text_cases(f"{POD}.{place}", 253, OBJECT_NAME, ("A", "a_b", "-a", "a.", "a..b"))
]


def _toleration(toleration: dict[str, Any], field: str, says: str, server: str = "") -> Case:
    at = f"{POD}.tolerations[0]{field}"
    return single_edit(f"{POD}.tolerations", [toleration], says, server, at=at)


TOLERATIONS = [
    single_edit(f"{POD}.tolerations", [{"operator": "Exists"}] * 33, "must have at most 32 entries", "Too many"),
    _toleration({}, ".key", "key is required with operator Equal"),
    _toleration({"key": ""}, ".key", "key is required with operator Equal"),
    _toleration({"key": "k" * 318, "operator": "Exists"}, ".key", "must have at most 317 characters", "Too long"),
    _toleration({"key": "a", "operator": "Is"}, ".operator", "must be 'Exists' or 'Equal'", "Unsupported value"),
    _toleration({"operator": "Exists", "value": "x"}, ".value", "value must be absent with operator Exists"),
    _toleration({"key": "a", "value": "v" * 64}, ".value", "must have at most 63 characters", "Too long"),
    _toleration(
        {"key": "a", "effect": "Never"}, ".effect", "must be 'NoSchedule', 'PreferNoSchedule'", "Unsupported value"
    ),
    _toleration({"key": "a", "tolerationSeconds": 1}, ".tolerationSeconds", "tolerationSeconds needs effect NoExecute"),
]

PULL_SECRETS = [
    single_edit(
        f"{POD}.imagePullSecrets", [{"name": f"a{i}"} for i in range(17)], "must have at most 16 entries", "Too many"
    ),
    *text_cases(
        f"{POD}.imagePullSecrets",
        253,
        OBJECT_NAME,
        ("A",),
        at=f"{POD}.imagePullSecrets[0].name",
        build=lambda name: [{"name": name}],
    ),
    Case(
        {f"{POD}.imagePullSecrets": [{"name": "a"}, {"name": "a"}]},
        f"{POD}.imagePullSecrets[1]",
        "a is listed twice",
        "Duplicate value",
        (f"{POD}.imagePullSecrets", "duplicate entries"),
    ),
    Case(
        {f"{POD}.imagePullSecrets": [{}]},
        f"{POD}.imagePullSecrets[0].name",
        "is required",
        "Required value",
        (f"{POD}.imagePullSecrets", "omits all key fields"),
    ),
]

RESOURCES = [
    case
    for kind in ("requests", "limits")
    for case in (
        *[
            single_edit(
                f"{POD}.resources.{kind}",
                {"cpu": value},
                "must be a non-negative quantity",
                at=f"{POD}.resources.{kind}.cpu",
            )
            for value in (-1, "-1", "many", "1 Gi", "", "1GB", "0x1")
        ],
        single_edit(
            f"{POD}.resources.{kind}",
            {"cpu": "1" * 33},
            "must have at most 32 characters",
            "Too long",
            at=f"{POD}.resources.{kind}.cpu",
        ),
        single_edit(
            f"{POD}.resources.{kind}", {"gpu": 1}, "every key must be cpu, memory, ephemeral-storage, hugepages-SIZE"
        ),
        single_edit(
            f"{POD}.resources.{kind}", {f"a.b/c{i}": 1 for i in range(17)}, "must have at most 12 entries", "Too many"
        ),
        single_edit(f"{POD}.resources.{kind}", {"nvidia.com/gpu": 1}, "set the tier's gpus instead of GPUs"),
        Case(
            {f"{POD}.resources.{kind}": {"amd.com/gpu": 1}, f"{DECODE}.gpuResource": "amd.com/gpu"},
            f"{POD}.resources.{kind}",
            "set the tier's gpus instead of GPUs",
        ),
    )
] + [
    single_edit(
        f"{POD}.resources",
        {"requests": {name: request}, "limits": {name: limit}},
        "a request must not exceed the limit of the same resource: lower the request or raise the limit",
        at=f"{POD}.resources.requests",
    )
    for name, request, limit in (
        ("cpu", 2, 1),
        ("cpu", "1001m", 1),
        ("memory", "1Gi", "1G"),
        ("memory", "2Ki", 2047),
        ("ephemeral-storage", "1Ti", "1T"),
    )
]


def _volumes(volumes: list[dict[str, Any]], field: str, says: str, server: str = "", **more: Any) -> Case:
    return single_edit(f"{POD}.volumes", volumes, says, server, at=f"{POD}.volumes{field}", **more)


def _mount(mount: dict[str, Any], field: str, says: str, server: str = "", **more: Any) -> Case:
    whole = {"name": "data", "mountPath": "/data", **mount}
    return Case(
        {f"{POD}.volumes": [{"name": "data", "emptyDir": {}}], f"{POD}.volumeMounts": [whole]},
        f"{POD}.volumeMounts[0]{field}",
        says,
        server,
        **more,
    )


VOLUMES = [
    _volumes([{"name": "disk"}], "[0]", "needs exactly one source of"),
    _volumes([{"name": "disk", "emptyDir": {}, "image": {}}], "[0]", "needs exactly one source of"),
    _volumes([{"name": f"v{i}", "emptyDir": {}} for i in range(33)], "", "must have at most 32 entries", "Too many"),
    _volumes(
        [{"name": "a", "emptyDir": {}}, {"name": "a", "emptyDir": {}}],
        "[1]",
        "a is listed twice",
        "Duplicate value",
        typed=(f"{POD}.volumes", "duplicate entries"),
    ),
    _volumes(
        [{"emptyDir": {}}],
        "[0].name",
        "is required",
        "Required value",
        typed=(f"{POD}.volumes", "omits all key fields"),
    ),
    _volumes([{"name": "", "emptyDir": {}}], "[0].name", "must not be empty", "should be at least 1 chars long"),
    _volumes([{"name": "a" * 64, "emptyDir": {}}], "[0].name", "must have at most 63 characters", "Too long"),
    _volumes([{"name": "A.b", "emptyDir": {}}], "[0].name", "must be a volume name"),
    *[
        _volumes([{"name": name, "emptyDir": {}}], "[0].name", "is reserved for Plimsoll's volumes")
        for name in ("scratch", "home", "shm", "model", "model-cache")
    ],
    _volumes([{"name": "plimsoll-x", "emptyDir": {}}], "[0].name", "names that begin with plimsoll- are Plimsoll's"),
    single_edit(
        f"{POD}.volumeMounts",
        [{"name": "data", "mountPath": "/data"}],
        "every volumeMount must name one of pod.volumes",
    ),
    _mount({"mountPath": "data"}, ".mountPath", "must be an absolute path without ':'"),
    _mount({"mountPath": "/a:b"}, ".mountPath", "must be an absolute path without ':'"),
    _mount({"mountPath": "/" + "a" * 512}, ".mountPath", "must have at most 512 characters", "Too long"),
    *[
        _mount({"mountPath": path}, ".mountPath", "is reserved for Plimsoll's mounts")
        for path in ("/tmp", "/home/plimsoll", "/home/plimsoll/hf", "/models", "/models/claim", "/dev/shm")
    ],
    _mount({"name": ""}, ".name", "must not be empty", "should be at least 1 chars long"),
    _mount({"name": "a" * 64}, ".name", "must have at most 63 characters", "Too long"),
    single_edit(
        f"{POD}.volumeMounts",
        [{"mountPath": "/a"}],
        "is required",
        "Required value",
        at=f"{POD}.volumeMounts[0].name",
    ),
    Case(
        {f"{POD}.volumeMounts": [{"name": "a"}]},
        f"{POD}.volumeMounts[0].mountPath",
        "is required",
        "Required value",
        (f"{POD}.volumeMounts", "omits all key fields"),
    ),
    _mount({"subPath": "/x"}, ".subPath", "must be a relative path"),
    _mount({"subPath": ""}, ".subPath", "must be a relative path"),
    _mount({"subPath": "a/../b"}, ".subPath", "must not contain '..'"),
    _mount({"subPath": "a" * 513}, ".subPath", "must have at most 512 characters", "Too long"),
    _mount({"mountPropagation": "All"}, ".mountPropagation", "must be 'None', 'HostToContainer'", "Unsupported value"),
    Case(
        {
            f"{POD}.volumes": [{"name": "data", "emptyDir": {}}],
            f"{POD}.volumeMounts": [{"name": "data", "mountPath": "/a"}] * 2,
        },
        f"{POD}.volumeMounts[1]",
        "/a is listed twice",
        "Duplicate value",
        (f"{POD}.volumeMounts", "duplicate entries"),
    ),
    Case(
        {
            f"{POD}.volumes": [{"name": "data", "emptyDir": {}}],
            f"{POD}.volumeMounts": [{"name": "data", "mountPath": f"/a{i}"} for i in range(33)],
        },
        f"{POD}.volumeMounts",
        "must have at most 32 entries",
        "Too many",
    ),
]


def _spread(constraint: dict[str, Any], field: str, says: str, server: str = "") -> Case:
    at = f"{POD}.topologySpreadConstraints[0]{field}"
    return single_edit(f"{POD}.topologySpreadConstraints", [constraint], says, server, at=at)


NODES = [
    single_edit(
        f"{POD}.topologySpreadConstraints", [{"topologyKey": "a"}] * 9, "must have at most 8 entries", "Too many"
    ),
    _spread({}, ".topologyKey", "is required", "Required value"),
    _spread({"topologyKey": ""}, ".topologyKey", "must not be empty", "should be at least 1 chars long"),
    _spread({"topologyKey": "a" * 318}, ".topologyKey", "must have at most 317 characters", "Too long"),
    _spread({"topologyKey": "a", "maxSkew": 0}, ".maxSkew", "must be at least 1", "greater than or equal to 1"),
    _spread(
        {"topologyKey": "a", "whenUnsatisfiable": "Never"},
        ".whenUnsatisfiable",
        "must be 'DoNotSchedule' or 'ScheduleAnyway'",
        "Unsupported value",
    ),
    *text_cases(
        f"{POD}.sharedMemory",
        32,
        "must be a quantity above zero, such as 64Gi",
        ("0", "-1Gi", "64GB", "much", ""),
        may_be_empty=True,
    ),
]

POD_CASES = [*NODES, *METADATA, *NAMES, *TOLERATIONS, *PULL_SECRETS, *RESOURCES, *VOLUMES]
