"""Loading of manifests from a file or from standard input."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml

from plimsoll.core.errors import InvalidSpec


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
