"""Manifests that a person names, from a file or from standard input: whatever they hold, the answer is a sentence."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml

from plimsoll.core.errors import InvalidSpec


def documents(name: str) -> list[Any]:
    """All documents that are not empty. name: of a file, or - for standard input. Raises InvalidSpec."""
    try:
        text = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        return [one for one in yaml.safe_load_all(text.decode()) if one]
    except OSError as error:
        raise InvalidSpec((f"{name}: {error.strerror}",)) from None
    except UnicodeDecodeError:
        raise InvalidSpec((f"{name}: is not text",)) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InvalidSpec((f"{name}: not YAML: {' '.join(str(error).split())}",)) from None
