"""The real picker in a process of its own, over objects from a file: python picker_process.py SETTINGS-JSON FILE."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import uvloop

from plimsoll.gateway.main import serve
from plimsoll.gateway.settings import ApiKeyMode, PickerSettings
from tests.gateway.file_source import FileSource

PATHS = ("tls_directory", "internal_tls", "peer_secret", "endpoint_picker_tls")


async def run(settings_json: str, objects: Path) -> None:
    """Serve until the process is stopped."""
    fields = json.loads(settings_json)
    settings = PickerSettings(
        **{
            **fields,
            "directory": Path(fields["directory"]),
            "namespaces": tuple(fields["namespaces"]),
            "api_keys": ApiKeyMode(fields["api_keys"]),
            **{name: Path(fields[name]) if fields[name] else None for name in PATHS},
        }
    )
    await serve(settings, FileSource(objects))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    uvloop.run(run(sys.argv[1], Path(sys.argv[2])))
