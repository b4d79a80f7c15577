"""vLLM's metric families by name, without `vllm:` and the `_total` of counters, each with its help text."""

from __future__ import annotations

from typing import Final

GAUGE_HELP: Final = {
    "num_requests_running": "Number of requests in model execution batches.",
    "num_requests_waiting": "Number of requests waiting to be processed.",
    "num_requests_waiting_by_reason": (
        "Number of waiting requests by reason. Reason labels: 'capacity' = waiting for scheduling capacity; "
        "'deferred' = deferred by transient constraints (LoRA budget, KV transfer, blocked status). Sum of all "
        "reasons equals vllm:num_requests_waiting."
    ),
    "engine_sleep_state": (
        "Engine sleep state; awake = 0 means engine is sleeping; awake = 1 means engine is awake; "
        "weights_offloaded = 1 means sleep level 1; discard_all = 1 means sleep level 2."
    ),
    "kv_cache_usage_perc": "KV-cache usage. 1 means 100 percent usage.",
    "num_requests_kv_fetch_by_stage": "Number of waiting requests by async KV load stage.",
}
HISTOGRAM_HELP: Final = {
    "request_prompt_tokens": "Number of prefill tokens processed.",
    "request_generation_tokens": "Number of generation tokens processed.",
    "iteration_tokens_total": "Histogram of number of tokens per engine_step.",
    "request_max_num_generation_tokens": "Histogram of maximum number of requested generation tokens.",
    "request_params_n": "Histogram of the n request parameter.",
    "request_params_max_tokens": "Histogram of the max_tokens request parameter.",
    "time_to_first_token_seconds": "Histogram of time to first token in seconds.",
    "inter_token_latency_seconds": "Histogram of inter-token latency in seconds.",
    "request_time_per_output_token_seconds": "Histogram of time_per_output_token_seconds per request.",
    "e2e_request_latency_seconds": "Histogram of e2e request latency in seconds.",
    "request_queue_time_seconds": "Histogram of time spent in WAITING phase for request.",
    "request_inference_time_seconds": "Histogram of time spent in RUNNING phase for request.",
    "request_prefill_time_seconds": "Histogram of time spent in PREFILL phase for request.",
    "request_decode_time_seconds": "Histogram of time spent in DECODE phase for request.",
    "request_num_preemptions": "Histogram of the number of times a request was preempted.",
    "request_prefill_kv_computed_tokens": (
        "Histogram of new KV tokens computed during prefill (excluding cached tokens)."
    ),
    "nixl_xfer_time_seconds": "Histogram of transfer duration for NIXL KV Cache transfers.",
    "nixl_post_time_seconds": "Histogram of transfer post time for NIXL KV Cache transfers.",
    "nixl_bytes_transferred": "Histogram of bytes transferred per NIXL KV Cache transfers.",
    "nixl_num_descriptors": "Histogram of number of descriptors per NIXL  KV Cache transfers.",
}
COUNTER_HELP: Final = {
    "prefix_cache_queries": "Prefix cache queries, in terms of number of queried tokens.",
    "prefix_cache_hits": "Prefix cache hits, in terms of number of cached tokens.",
    "external_prefix_cache_queries": (
        "External prefix cache queries from KV connector cross-instance cache sharing, in terms of number of queried "
        "tokens."
    ),
    "external_prefix_cache_hits": (
        "External prefix cache hits from KV connector cross-instance cache sharing, in terms of number of cached "
        "tokens."
    ),
    "prompt_tokens": "Number of prefill tokens processed.",
    "generation_tokens": "Number of generation tokens processed.",
    "num_preemptions": "Cumulative number of preemption from the engine.",
    "prompt_tokens_by_source": "Number of prompt tokens by source.",
    "prompt_tokens_cached": "Number of cached prompt tokens (local + external).",
    "prompt_tokens_cached_by_source": "Prefix-cache hit tokens by the cache tier that supplied them.",
    "request_success": "Count of successfully processed requests.",
    "admission_rejections": "Number of admission attempts rejected by a queue limit, by reason.",
}
NIXL_COUNTER_HELP: Final = {
    "nixl_num_failed_transfers": "Number of failed NIXL KV Cache transfers.",
    "nixl_num_failed_notifications": "Number of failed NIXL KV Cache notifications.",
    "nixl_num_kv_expired_reqs": (
        "Number of requests that had their KV expire. NOTE: This metric is tracked on the P instance."
    ),
    "nixl_num_notifications_after_expiry": (
        "Number of completion notifications for requests that were no longer tracked, usually because their KV lease "
        "expired."
    ),
}

METRIC_FAMILIES: Final = frozenset({*GAUGE_HELP, *HISTOGRAM_HELP, *COUNTER_HELP, *NIXL_COUNTER_HELP})
