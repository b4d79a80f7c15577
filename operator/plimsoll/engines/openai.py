"""Any server with an OpenAI-compatible API: the user gives its image, command, arguments, port and metric names.

Nothing is known of it. It must accept the model name that clients send, and should be tried with `conformance` first.
"""

from __future__ import annotations

from typing import Final

from plimsoll.engines.engine import Engine, Feature

OPENAI: Final = Engine(
    name="openai",
    title="an OpenAI-compatible server",
    features=frozenset({Feature.OWN_SERVER, Feature.EMBED, Feature.SCORE, Feature.TRANSCRIBE}),
    metrics=None,
    default_sequences=256,  # sequences of which an outage is still seen as one
)
