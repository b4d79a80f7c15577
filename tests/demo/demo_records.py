"""Lines of the demo, made by hand."""

from __future__ import annotations

from e2e.demo.records import ReplicaSample, RequestLine


def make_request(sent_s: float = 0.0, **more: object) -> RequestLine:
    """A request that went well within every target, unless told otherwise."""
    fields: dict[str, object] = {
        "id": f"r{sent_s}",
        "run": "fleet",
        "request_class": "code",
        "tenant": "t",
        "sent_s": sent_s,
        "ended_s": sent_s + 1.0,
        "prompt_tokens": 100,
        "output_tokens_asked": 10,
        "status": 200,
        "outcome": "ok",
        "reason": "",
        "retry_after_s": None,
        "ttft_s": 0.5,
        "tpot_s": 0.02,
        "output_tokens": 10,
        "finish_reason": "length",
        **more,
    }
    return RequestLine(**fields)  # type: ignore[arg-type]


def make_shed(sent_s: float) -> RequestLine:
    """A request that the gateway refused."""
    refused = {"status": 429, "outcome": "shed", "reason": "overloaded", "retry_after_s": 3.0}
    none = {"ttft_s": None, "tpot_s": None, "output_tokens": 0, "finish_reason": None}
    return make_request(sent_s, **refused, **none)


def make_sample(
    t_s: float, desired: int = 1, ready: int = 1, starting: int = 0, draining: int = 0, tier: str = "decode"
) -> ReplicaSample:
    """One look at one tier."""
    return ReplicaSample("fleet", t_s, tier, desired, ready, starting, draining)
