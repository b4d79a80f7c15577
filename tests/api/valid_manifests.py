"""Manifests at the edge of what is allowed: each must pass `parse` and the API server, or a rule is too strict."""

from __future__ import annotations

from typing import Any

from tests.api.cases import DECODE, POD
from tests.api.cases_admission import SLO
from tests.api.cases_draft import VALID_DRAFTS

VALID_EDITS: list[dict[str, Any]] = [
    {"metadata.name": "a"},
    {"metadata.name": "a" + "-" * 38 + "9"},
    {"spec.model.uri": "s3://models/chat", "spec.engine.args": ["--load-format", "runai_streamer"]},
    {"spec.engine.args": ["--load-format=fastsafetensors", "--model-loader-extra-config", '{"concurrency":16}']},
    {"spec.engine.args": ["--mm-processor-kwargs", '{"min_pixels":\t3136, "max_pixels" : 1003520}']},
    *[
        {"spec.model.uri": uri}
        for uri in (
            "hf://Qwen/Qwen3-8B",
            "hf://a/b.c_d-e",
            "hf://_a/_b",
            "pvc://claim/chat",
            "pvc://claim.v2/a/b.c/d/",
            "file:///opt/models/tiny",
            "file:///x/",
            "s3://models/team/chat/",
            "s3://my.models",
            "gs://models/chat",
            "https://example.com:8443/m/chat-1.0.tar.gz",
            "oci://registry:5000/team/chat_a/b:1.0",
            "oci://ghcr.io/chat@sha256:" + "0" * 64,
        )
    ],
    {"spec.model.uri": "s3://models/chat", "spec.model.digest": "sha256:" + "0" * 64},
    {"spec.model.uri": "https://example.com/chat.tgz", "spec.model.secretRef": {"name": "a"}},
    {"spec.model.uri": "oci://ghcr.io/team/chat:1", "spec.model.path": "models/chat"},
    *[{"spec.model.name": name} for name in ("x", "Qwen/Qwen3-8B", "acme:chat_2.1", "a" * 253)],
    *[{"spec.model.revision": revision} for revision in ("main", "refs/pr/1", "0f3a", "v1.0")],
    {"spec.model.secretRef": {"name": "a.b"}},
    {"spec.model.secretRef": {"name": "a", "key": "HF_TOKEN.txt"}},
    {"spec.model.cache": {}},
    *[
        {"spec.model.cache.sizeLimit": size}
        for size in ("1", "64Gi", "0.5Ti", "1e12", "1E", "500m", "+1Gi", ".5Gi", "2.Gi")
    ],
    *[
        {"spec.engine.image": image}
        for image in ("x", "registry.example.com:5000/a/b_c:1.0", "localhost:5001/x@sha256:" + "0" * 64)
    ],
    *[{"spec.engine.version": version} for version in ("0.32.0", "_x", "v1-rc.1", "v" * 128)],
    *[{"spec.engine.drainTimeout": time} for time in ("5s", "90s", "1h30m", "24h")],
    {
        "spec.engine.args": [
            "--max-model-len",
            "8192",
            "--portable",
            "--hosts=x",
            "--modeling",
            "--api-keys",
            "-tp=2",
            "host",
            "--",
            '{"a": "b c"}',
            '--hf-overrides={"a": 1}',
            "a --host b",
            "--chat-template-content-format",
            "x" * 4096,
        ],
        "spec.tiers.prefill.gpus": 2,
        "spec.tiers.decode.gpus": 4,
    },
    *[
        {"spec.engine.args": args, "spec.tiers.prefill.gpus": gpus, "spec.tiers.decode.gpus": gpus}
        for gpus, args in (
            (8, ["--data-parallel-size", "8"]),
            (8, ["-dp=2", "--pipeline_parallel_size", "2"]),
            (8, ["-tp", "16", "--tensor-parallel-size", "4", "-dp", "2", "-ep"]),
            (8, ["--data-parallel-size", "0"]),
            (1, ["-tp", "2", "--distributed-executor-backend=ray"]),
            (1, ["--data-parallel-size=4", "--data-parallel-rank", "0"]),
            (0, ["-tp", "2"]),
        )
    ],
    {
        "spec.engine.args": ["--tensor-parallel-size", "2"],
        **{f"spec.tiers.{role}.gpuResource": "aws.amazon.com/neuron" for role in ("prefill", "decode")},
    },
    {"spec.engine.args": ["--seed"] * 128},
    {"spec.engine.env": [{"name": name, "value": ""} for name in ("A", "a.b-c", "_X", "MY_PLIMSOLL_X", "PLIMSOLL")]},
    {"spec.engine.env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "a", "key": "b", "optional": True}}}]},
    {"spec.slo": {"ttft": "59m59.999s", "e2e": "1h"}},
    {"spec.slo": {"ttft": "1ns", "tpot": "1h", "e2e": "2ns"}},
    {"spec.slo": {"ttft": "1s", "itl": "1ns"}},
    {"spec.slo": {"tpot": "1s", "itl": "1h"}},
    *[
        {"spec.slo": {"percentile": percentile, "ttft": ttft, "tpot": "1ns"}}
        for percentile, ttft in (
            (1, "1h"),
            (99, "3600s"),
            (50, "59m59.999s"),
            (95, "1.5ms"),
            (95, "100µs"),
            (95, "10us500ns"),
        )
    ],
    *[{"spec.slo": {"ttft": "1s", "ttftPerKToken": allowance}} for allowance in ("0s", "0ms", "100µs", "3600s", "1h")],
    *[{"spec.engine.runtime": runtime} for runtime in ("vllm", "simulated")],
    *[{"spec.engine.prefixCache": scope} for scope in ("Shared", "PerTenant")],
    *[{"spec.whenPrefillUnavailable": policy} for policy in ("Serve", "Reject")],
    {"spec.engine": {"runtime": "simulated", "version": "1"}},
    {"spec.scaling": {}},
    *[{"spec.scaling": {"mode": mode, "paused": mode == "Off"}} for mode in ("Auto", "Recommend", "Off")],
    *[{"spec.scaling.headroom": headroom} for headroom in ("0%", "00%", "9%", "09%", "10%", "89%", "90%")],
    *[{"spec.scaling.sloMissCost": cost} for cost in (0, 1, 100_000)],
    *[{"spec.scaling.warmReplicas": replicas} for replicas in (0, 1000)],
    *[{"spec.scaling.horizon": horizon} for horizon in ("1s", "1000ms", "90s", "2h", "1h59m60s")],
    *[
        {f"spec.scaling.{way}": {"replicas": replicas, "per": per}}
        for way in ("scaleUp", "scaleDown")
        for replicas, per in ((1, "1ns"), (1000, "24h"), (2, "5m"))
    ],
    *[
        {"spec.scaling.prefillPerDecode": bounds}
        for bounds in (
            {"min": 0},
            {"max": "0.001"},
            {"min": "0.000", "max": 1000},
            {"min": "0.5", "max": "0.5"},
            {"min": "0.5", "max": "0.50"},
            {"min": 9, "max": "10.5"},
            {"min": "999.999", "max": "1000"},
        )
    ],
    *[
        {"spec.scaling.schedule": [{"from": start, "until": end, "minReplicas": 2}]}
        for start, end in (("00:00", "24:00"), ("22:00", "06:00"), ("23:59", "00:00"), ("19:00", "20:30"))
    ],
    {"spec.scaling.schedule": [{"from": "00:00", "until": "00:01", "minReplicas": 1000, "maxReplicas": 1000}]},
    {
        "spec.scaling.schedule": [
            {"from": "08:00", "until": f"20:{minute}", "maxReplicas": 1} for minute in range(10, 26)
        ]
    },
    *[
        {"spec.scaling.schedule": [{"days": days, "from": "08:00", "until": "09:00", "maxReplicas": 1}]}
        for days in (["Sun"], ["Sun", "Mon"], ["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"])
    ],
    *[
        {"spec.scaling.schedule": [{"timeZone": zone, "from": "08:00", "until": "09:00", "maxReplicas": 1}]}
        for zone in ("UTC", "Europe/Berlin", "America/Argentina/Buenos_Aires", "Etc/GMT+12", "Asia/Kathmandu", "GMT0")
    ],
    {
        "spec.scaling.schedule": [
            {"from": "08:00", "until": "09:00", "maxReplicas": 1, **more}
            for more in ({}, {"days": ["Mon"]}, {"days": ["Tue"]}, {"days": ["Mon", "Tue"]}, {"timeZone": "Asia/Tokyo"})
        ]
    },
    {
        "spec.scaling.schedule": [  # the dearest for the API server to compare
            {
                "days": ["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"],
                "from": "08:00",
                "until": f"20:{minute}",
                "timeZone": "America/Argentina/ComodRivadavia",
                "minReplicas": 1,
                "maxReplicas": 1000,
            }
            for minute in range(10, 26)
        ]
    },
    *[
        {"spec.cost": {"gpuHour": price}}
        for price in (1, 999_999_999, "2.50", "0.000001", "999999999.5", "0.1", "007", "999999999.12345")
    ],
    {"spec.cost": {"gpuHour": "2.50", "currency": "EUR"}},
    *[
        {f"{DECODE}.minReplicas": least, f"{DECODE}.maxReplicas": most}
        for least, most in ((1, 1), (1000, 1000), (2, 9))
    ],
    *[
        {
            "spec.slo": SLO,
            "spec.tiers.prefill": {"minReplicas": 0},
            DECODE: {"minReplicas": 0, **more},
            "spec.scaling.schedule": [{"from": "08:00", "until": "20:00", "minReplicas": hours}],
        }
        for more, hours in (({}, 1), ({"maxReplicas": 1}, 0), ({"maxReplicas": 1000}, 1000))
    ],
    {"spec.slo": SLO, "spec.scaling.schedule": [{"from": "20:00", "until": "06:00", "minReplicas": 0}]},
    *[
        {"spec.slo": SLO, "spec.admission": admission}
        for admission in (
            {},
            {"whenFull": "Queue", "maxQueued": 1, "tenants": []},
            {"whenFull": "Shed", "maxQueued": 100_000, "classes": [{"name": "a"}]},
            *[{"whenFull": "Downgrade", "fallback": {"name": name}} for name in ("a", "b" * 40, "chat-2", "chat2")],
            {"whenFull": "Downgrade", "fallback": {"name": "a"}, "classes": [{"name": "a", "maxQueueTime": "0s"}]},
        )
    ],
    *[
        {"spec.slo": SLO, "spec.admission.classes": classes}
        for classes in (
            [{"name": name} for name in ("default", "a", "0", "a--b", "z" * 63)],
            [{"name": f"p{at}", "priority": priority} for at, priority in enumerate((-1000, 0, 1000))],
            [
                {"name": f"h{at}", "maxQueueTime": value}
                for at, value in enumerate(("0s", "1.5s", "120s", "2m", "1m60s"))
            ],
            [{"name": f"f{at}", "maxUtilization": value} for at, value in enumerate(("10%", "99%", "100%"))],
            [
                {"name": f"g{at}", "guaranteedShare": value}
                for at, value in enumerate(("0%", "90%", "09%", "00%", "1%"))
            ],
            [{"name": "a", "slo": {"ttft": "1ns"}}, {"name": "b", "slo": {"tpot": "1h"}}],
            [{"name": "a", "slo": {"ttft": "1h", "ttftPerKToken": "1h", "tpot": "1us"}}],
            [{"name": "a", "slo": {"e2e": "1h"}}, {"name": "b", "slo": {"ttft": "1s", "tpot": "1h", "e2e": "1.001s"}}],
            [  # the dearest for the API server to judge
                {
                    "name": f"c{at:062}",
                    "priority": at,
                    "maxQueueTime": "1m30.5s" + "1ns" * 8,
                    "guaranteedShare": "06%",
                    "maxUtilization": "100%",
                    "slo": {name: "0.1s" + "1ns" * 9 for name in ("ttft", "ttftPerKToken", "tpot")}
                    | {"e2e": "0.2s" + "1ns" * 9},
                }
                for at in range(16)
            ],
        )
    ],
    *[
        {"spec.slo": SLO, "spec.admission.tenants": tenants}
        for tenants in (
            [{"name": name} for name in ("a", "A", "team-1", "a/b:c@d", "!~", "{}", '"', "t" * 64)],
            [{"name": f"w{weight}", "weight": weight} for weight in (1, 1000)],
            [{"name": "a", "tokensPerMinute": 1}, {"name": "b", "tokensPerMinute": 1_000_000_000}],
            [
                {"name": f"r{at}", "requestsPerSecond": rate}
                for at, rate in enumerate((1, 999_999, "5", "0.5", "0.001", "999999.999", "007", "1.50"))
            ],
            [{"name": f"t{at:063}", "weight": 7, "requestsPerSecond": "123456.789"} for at in range(256)],
        )
    ],
    {"spec.requestLimits": {}},
    *[{"spec.requestLimits.maxOutputTokens": tokens} for tokens in (1, 100_000_000)],
    *[{"spec.requestLimits.maxDuration": text} for text in ("1s", "1000ms", "2h", "7200s", "1h59m60s")],
    *[{"spec.requestLimits.idleTimeout": text} for text in ("5s", "600s")],
    {
        "spec.slo": SLO,
        "spec.requestLimits": {"maxOutputTokens": 5, "maxDuration": "1m", "idleTimeout": "30s"},
        "spec.admission.classes": [
            {"name": "a", "requestLimits": {}},
            {"name": "b", "requestLimits": {"maxDuration": "5s"}},
        ],
    },
    *[{f"{DECODE}.gpus": gpus} for gpus in (0, 1, 64)],
    {f"{DECODE}.nodes": 1},
    *[{f"{DECODE}.gpuResource": name} for name in ("amd.com/gpu", "nvidia.com/mig-1g.10gb", "a/b")],
    *[
        {f"{DECODE}.rollout": {"maxSurge": surge, "maxUnavailable": unavailable}}
        for surge, unavailable in ((0, 1), (1, 0), ("25%", "0%"), ("100%", 1000), (1000, "1%"))
    ],
    *[
        {f"{POD}.{place}": {"a": "", "example.com/b.c_d-e": "F.g_h-1", "k" * 63: "v" * 63}}
        for place in ("nodeSelector", "labels", "annotations")
    ],
    {f"{POD}.annotations": {"a": 'any text\n"at" all: äöü' * 100}},
    {f"{POD}.labels": {"app.kubernetes.io/part-of": "x", "plimsoll.devx/a": "y", "version": "1"}},
    {
        f"{POD}.tolerations": [
            {"operator": "Exists"},
            {"key": "a"},
            {"key": "a", "value": ""},
            {"key": "a", "operator": "Exists", "value": ""},
            {"key": "a", "value": "b", "effect": "NoExecute", "tolerationSeconds": -1},
            {"key": "a", "operator": "Exists", "effect": "PreferNoSchedule"},
        ]
    },
    {f"{POD}.runtimeClassName": "nvidia", f"{POD}.priorityClassName": "a.b-c", f"{POD}.schedulerName": "s1"},
    {f"{POD}.imagePullSecrets": [{"name": "a"}, {"name": "b"}]},
    {
        f"{POD}.affinity": {
            "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": []}}
        }
    },
    {f"{POD}.topologySpreadConstraints": []},
    {
        f"{POD}.topologySpreadConstraints": [
            {"topologyKey": "a"},
            {
                "topologyKey": "k" * 317,
                "maxSkew": 5,
                "whenUnsatisfiable": "DoNotSchedule",
                "minDomains": 3,
                "labelSelector": {"matchLabels": {"a": "b"}},
            },
        ]
    },
    *[{f"{POD}.sharedMemory": size} for size in ("1", "16Gi", "0.5Ti")],
    *[{f"{POD}.ipcLock": lock} for lock in (True, False)],
    {
        f"{POD}.resources": {
            "requests": {
                "cpu": 4,
                "memory": "1G",
                "ephemeral-storage": "1Gi",
                "hugepages-2Mi": "4Mi",
                "example.com/nic": 1,
            },
            "limits": {"cpu": "4000m", "memory": "1Gi", "example.com/nic": "1"},
        }
    },
    {f"{POD}.resources.requests": {"cpu": 0, "memory": "1e9"}},
    {f"{POD}.resources.limits": {"amd.com/gpu": 1}},
    {
        f"{POD}.volumes": [{"name": "a", "emptyDir": {}}, {"name": "b", "nfs": {"server": "x", "path": "/"}}],
        f"{POD}.volumeMounts": [
            {"name": "a", "mountPath": "/a", "subPath": "x/..y/z", "readOnly": True},
            {"name": "a", "mountPath": "/home/plimsoll/.config", "mountPropagation": "HostToContainer"},
            {"name": "b", "mountPath": "/tmp2"},
        ],
    },
]

# Of a service with the tier `serve` alone.
VALID_AGGREGATED: list[dict[str, Any]] = [
    *VALID_DRAFTS,
    *[
        {"spec.engine": {"runtime": runtime, "image": "example.com/x:1", "args": args}, "spec.model": model}
        for runtime, args, model in (
            ("llama-cpp", ["--parallel", "8", "-c", "4096"], {"uri": "pvc://models/m.gguf"}),
            ("llama-cpp", [], {"uri": "hf://org/repo-GGUF", "task": "embed"}),
            (
                "tensorrt-llm",
                ["--max_batch_size", "64", "--config", "/etc/a.yaml"],
                {"uri": "hf://a/b", "revision": "v1"},
            ),
            ("tgi", ["--max-total-tokens", "4096", "--json-output"], {"uri": "pvc://models/m"}),
            ("sglang", ["--context-length", "4096", "-tp", "2"], {"uri": "hf://a/b", "revision": "v1"}),
            ("openai", ["--host", "0.0.0.0", "--port=8000", "-m", "x"], {"uri": "file:///m", "task": "transcribe"}),
        )
    ],
    *[
        {
            "spec.engine": {
                "runtime": runtime,
                "image": "example.com/x:1",
                "env": [
                    {"name": name, "value": "8"},
                    {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "a", "key": "b"}}},
                ],
            }
        }
        for runtime, name in (("tgi", "MAX_BATCH_SIZE"), ("llama-cpp", "LLAMA_ARG_CTX_SIZE"), ("vllm", "NUM_SHARD"))
    ],
    {
        "spec.engine": {
            "runtime": "openai",
            "image": "example.com/x:1",
            "command": ["/bin/server", "serve"],
            "port": 65535,
            "healthPath": "/",
            "metrics": {"path": "/prom/metrics", "port": 1024, "running": "a:b_c", "ttft": "_t"},
        }
    },
    {"spec.model.cache": {"nodeLocal": True}},
    {"spec.model.cache": {"nodeLocal": False, "sizeLimit": "1Gi"}},
    {"spec.adapters": []},
    {"spec.adapters": [{"name": f"acme/a:{number}", "uri": "file:///opt/a"} for number in range(256)]},
    {
        "spec.adapters": [
            {"name": "a" * 128, "uri": "pvc://claim/a", "pinned": True},
            {"name": "b", "uri": "hf://a/b", "revision": "main"},
        ],
        "spec.model.task": "generate",
        "spec.engine.args": ["--max-num-seqs", "8", "--max-lorax"],
        "spec.engine.lora": {"maxLoras": 2, "maxCpuLoras": 2, "maxLoraRank": 512},
    },
    {"spec.engine.lora": {}},
    {"spec.engine.tuning": "Off"},
    {"spec.engine.tuning": "Auto", "spec.slo": {"ttft": "1s"}},
    {"spec.engine.lora": {"maxLoras": 256}},
    {"spec.engine.args": ["--enable-lora", "--api-server-count=2"]},
]

# Of a service with a target.
VALID_ADOPTED: list[dict[str, Any]] = [
    {},
    {"spec.engine.runtime": "simulated", "spec.scaling.mode": "Auto"},
    {"spec.targets.serve.podSelector": "app=llm, leaderworkerset.sigs.k8s.io/worker-index=0", "spec.model.name": "m"},
    {"spec.targets.serve.scaleTargetRef.apiVersion": "v1", "spec.targets.serve.metricsPort": 65535},
    {"spec.targets.serve.minReplicas": 1000, "spec.targets.serve.maxReplicas": 1000, "spec.targets.serve.gpus": 0},
    {"spec.scaling.schedule": [{"from": "08:00", "until": "20:00", "minReplicas": 2}]},
    {
        "spec.targets.serve.port": 8000,
        "spec.requestLimits": {"maxDuration": "60s"},
        "spec.admission": {"classes": [{"name": "a", "requestLimits": {"idleTimeout": "30s"}}]},
    },
]

VALID_PAIRS: list[dict[str, Any]] = [
    {},
    {"spec.targets.decode.metricsPort": 8200, "spec.targets.prefill.podSelector": "llm-d.ai/role=prefill"},
    {"spec.scaling.mode": "Auto"},
]
