"""Lines of the demo, made by hand."""

from __future__ import annotations

from e2e.demo.lines import Replicas, Request


def request(sent_s: float = 0.0, **more: object) -> Request:
    """A request that went well within every target, unless told otherwise."""
    fields: dict[str, object] = {
        "id": f"r{sent_s}",
        "run": "fleet",
        "klass": "code",
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
    return Request(**fields)  # type: ignore[arg-type]


def shed(sent_s: float) -> Request:
    """A request that the gateway refused."""
    refused = {"status": 429, "outcome": "shed", "reason": "overloaded", "retry_after_s": 3.0}
    none = {"ttft_s": None, "tpot_s": None, "output_tokens": 0, "finish_reason": None}
    return request(sent_s, **refused, **none)


def look(
    t_s: float, desired: int = 1, ready: int = 1, starting: int = 0, draining: int = 0, tier: str = "decode"
) -> Replicas:
    """One look at one tier."""
    return Replicas("fleet", t_s, tier, desired, ready, starting, draining)
