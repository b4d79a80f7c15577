"""Speculative decoding of real vLLM, started by the launcher with the argument that the operator makes of the spec.

The model's weights are random and repeat nothing. A grammar makes the answer repeat the prompt, so that n-grams of the
prompt are right.
"""

from __future__ import annotations

import contextlib
import http.client
from collections.abc import Iterator
from pathlib import Path

import pytest

from plimsoll.adapters.engine_metrics import parse_metrics
from plimsoll.api import labels
from plimsoll.api.v1alpha1 import parse
from plimsoll.core.demand.engine_aggregator import EngineAggregator
from plimsoll.core.demand.service_metrics import NO_DATA
from plimsoll.core.ports import EngineReading
from plimsoll.core.types import Role
from plimsoll.engines import launched
from plimsoll.resources import engine_memory
from tests.engine_image.test_vllm import Engine, body, engine, model, pytestmark  # noqa: F401

WORDS = "one two three four five six seven eight "
POD = "chat-serve-0"


def _arguments() -> list[str]:
    spec = {"method": "ngram", "maxBatch": 8}
    service = {
        "apiVersion": labels.API_VERSION,
        "kind": labels.KIND,
        "metadata": {"name": "chat", "namespace": "team"},
        "spec": {"model": {"uri": "hf://org/chat"}, "tiers": {"serve": {}}, "engine": {"speculative": spec}},
    }
    return engine_memory.arguments(parse(service), ())


@pytest.fixture(scope="module")
def speculating(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:  # noqa: F811
    """An engine that drafts n-grams, ready."""
    with engine(model, "serve", tmp_path_factory.mktemp("speculation"), _arguments()) as one:
        one.ready.wait()
        assert one.process.poll() is None, "".join(one.log[-40:])
        yield one


def _read(one: Engine, at_s: float) -> EngineReading:
    """What the operator reads from the launcher's port; a busy machine may be late for its polls."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", one.port, timeout=30)) as connection:
        connection.request("GET", "/metrics")
        return parse_metrics(connection.getresponse().read(), POD, at_s, launched.METRICS)


def test_vllm_drafts_of_repeated_text_are_accepted(speculating: Engine) -> None:
    tier = EngineAggregator(Role.SERVE)
    before = _read(speculating, 0.0)
    tier.observe(before)
    requested = body(WORDS * 4, 48, structured_outputs={"regex": f"({WORDS}){{8}}"})
    status, got = speculating.post(requested)
    assert (status, got["choices"][0]["text"][: len(WORDS)]) == (200, WORDS)
    after = _read(speculating, 5.0)
    tier.observe(after)
    acceptance = tier.collect(after.at_s, [POD], 0.95, NO_DATA, NO_DATA).draft_acceptance
    print(
        f"drafted {before.draft_tokens} to {after.draft_tokens}, accepted {after.accepted_draft_tokens}: {acceptance}"
    )
    assert before.draft_tokens == before.accepted_draft_tokens == 0
    assert after.draft_tokens is not None
    assert after.accepted_draft_tokens is not None
    assert isinstance(acceptance, float)
    assert 0 < acceptance == after.accepted_draft_tokens / after.draft_tokens <= 1


@pytest.mark.parametrize("field", [{"logit_bias": {"7": 1}}, {"min_p": 0.1}], ids=["logit_bias", "min_p"])
def test_vllm_that_drafts_refuses_two_parameters(speculating: Engine, field: dict[str, object]) -> None:
    status, got = speculating.post({**body(WORDS, 4), "temperature": 1.0, **field})
    print(got)
    assert (status, got["error"]["type"]) == (400, "invalid_request_error")
    assert "speculative decoding" in got["error"]["message"]
