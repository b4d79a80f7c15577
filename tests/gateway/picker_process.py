"""The real picker in a process of its own, over objects from a file: python picker_process.py SETTINGS-JSON FILE."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import uvloop

from plimsoll.gateway.main import serve
from plimsoll.gateway.settings import ApiKeyMode, PickerSettings
from tests.gateway.kube_objects import FileSource

PATHS = ("tls_directory", "engine_tls", "peer_secret", "endpoint_picker_tls")

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    fields = json.loads(sys.argv[1])
    settings = PickerSettings(
        **{
            **fields,
            "directory": Path(fields["directory"]),
            "namespaces": tuple(fields["namespaces"]),
            "api_keys": ApiKeyMode(fields["api_keys"]),
            **{name: Path(fields[name]) if fields[name] else None for name in PATHS},
        }
    )
    uvloop.run(serve(settings, FileSource(Path(sys.argv[2]))))
