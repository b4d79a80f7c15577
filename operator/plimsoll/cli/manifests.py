"""Loading of manifests from a file or from standard input."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml

from plimsoll.core.errors import InvalidSpec


def load_documents(name: str) -> list[Any]:
    """Return all non-empty YAML documents. name: a file, or - for standard input. Raises InvalidSpec."""
    try:
        text = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        return [one for one in yaml.safe_load_all(text.decode()) if one]
    except OSError as error:
        raise InvalidSpec((f"{name}: {error.strerror}",)) from None
    except UnicodeDecodeError:
        raise InvalidSpec((f"{name}: is not UTF-8 text",)) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InvalidSpec((f"{name}: is not valid YAML: {' '.join(str(error).split())}",)) from None
