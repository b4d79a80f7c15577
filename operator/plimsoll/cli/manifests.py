"""Manifests: loading from a file or from standard input, and the name of a new service."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any, Final

import yaml

from plimsoll.core.errors import InvalidSpec

_MAX_NAME_CHARS: Final = 40


def service_name(name: str) -> str:
    """Return a name for a service: that of an object or a model, as far as it is valid."""
    cleaned = re.sub(r"[^a-z0-9-]", "-", name.lower())[:_MAX_NAME_CHARS].strip("-")
    return cleaned if cleaned[:1].isalpha() else f"llm-{cleaned}"[:_MAX_NAME_CHARS].strip("-")


def load_documents(name: str) -> list[Any]:
    """Return all non-empty YAML documents. name: a file, or - for standard input. Raises InvalidSpec, also for none."""
    source = "standard input" if name == "-" else name
    try:
        text = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        documents = [one for one in yaml.safe_load_all(text.decode()) if one]
    except OSError as error:
        raise InvalidSpec((f"{source}: {error.strerror}",)) from None
    except UnicodeDecodeError:
        raise InvalidSpec((f"{source}: is not UTF-8 text",)) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InvalidSpec((f"{source}: is not valid YAML: {_problem(error)}",)) from None
    if not documents:
        raise InvalidSpec((f"{source}: has no YAML document",))
    return documents


def _problem(error: Exception) -> str:
    """Return the error and its place in one line, without the parser's excerpt."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return " ".join(str(error).split())
    mark = error.problem_mark
    return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem or error.context}"
