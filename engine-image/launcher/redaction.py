"""Removes secrets from text that leaves a process: logs, Events, conditions, termination messages.

Problem: a command line, a URL or an error of a library can hold a password or a token, and logs and status are read by
more people than Secrets are.

Idea: every sink passes its text through `redact`. It looks for names of secrets with a value (`--hf-token X`,
`"password": "X"`, `api_key=X`), for user and password in a URL, and for well-known forms of tokens. Prose such as
`secret "x" not found` stays. `make generate` copies this module to `engine-image/launcher/redaction.py`.
"""

from __future__ import annotations

import re
from typing import Final

REDACTED: Final = "***"

_NAME: Final = (
    r"(?:[\w.-]*[_.-])?(?:token|password|passwd|secret|credentials?|(?:api|access|secret|private|auth)[_-]?key)"
)
_QUOTED: Final = r"\"(?:[^\"\\]|\\.)+\"|'(?:[^'\\]|\\.)+'"
_NO_SECRET: Final = (
    r"(?!['\"]?<|(?:None|null|True|False|true|false|\d+(?:\.\d+)?)(?![\w.-]))"  # `<s>` is a token of text
)
_VALUES: Final = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        rf"(?P<name>(?<![\w.-])--?{_NAME}(?:=|\s+)){_NO_SECRET}(?!-)(?:{_QUOTED}|[^\s'\"])+",
        rf"(?P<name>(?P<quote>[\"']){_NAME}(?P=quote)\s*:\s*\[?\s*){_NO_SECRET}(?:{_QUOTED})",
        rf"(?P<name>(?<![\w.-]){_NAME}=\[?){_NO_SECRET}(?:{_QUOTED}|[^\s,;&'\"()\[\]]+)",
        r"(?P<name>(?<![a-z0-9+.-])[a-z][a-z0-9+.-]*://)[^\s/@'\"]+(?=@)",
        r"(?P<name>\bBearer\s+)[A-Za-z0-9._~+/=-]{8,}",
    )
)
_TOKENS: Final = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|AKIA[A-Z0-9]{16}"
    r"|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]+)"
)
_HINT: Final = re.compile(r"token|passw|secret|credential|key|://|bearer|hf_|sk-|gh[pousr]_|AKIA|eyJ", re.IGNORECASE)


def redact(text: str) -> str:
    """The text with `***` in the place of each secret that it recognises."""
    if _HINT.search(text) is None:
        return text
    for pattern in _VALUES:
        text = pattern.sub(rf"\g<name>{REDACTED}", text)
    return _TOKENS.sub(REDACTED, text)
