"""The rule about `--mm-processor-kwargs` in `engine.args`, by which the gateway counts pictures.

An engine with a value that is no JSON object does not start, and one whose bounds are no numbers fails each picture.
"""

from __future__ import annotations

from typing import Any, Final

from plimsoll.api.v1alpha1.api_model import ValidationRule, quote
from plimsoll.engines import vllm
from plimsoll.engines.registry import engine_named

_SAYS: Final = f"{vllm.PROCESSOR_KWARGS} must be a JSON object, and its bounds of pixels whole numbers above 0"
# The API server cannot read JSON: what begins otherwise, and a bound that begins with no digit and is not null.
_PATTERN: Final = '(?m)^--mm.processor.kwargs(=|\\n)(\\s*[^{\\s]|.*"(min|max)_pixels"\\s*:\\s*[^1-9n\\s])'


def _error(spec: Any) -> str:
    try:
        engine_named(spec.runtime).pixel_bounds(spec.args)
    except ValueError as error:
        return str(error)
    return ""


PROCESSOR_RULES: Final[tuple[ValidationRule[Any], ...]] = (
    ValidationRule(
        f"!has(self.args) || !self.args.join('\\n').matches({quote(_PATTERN)})",
        _SAYS,
        lambda own: not _error(own),
        field=".args",
        format_message=lambda own: f"{_SAYS}: {_error(own)}",
    ),
)
