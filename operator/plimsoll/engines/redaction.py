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
    r"(?:[\w.-]*(?:[_.-]|(?-i:(?<=[a-z0-9])(?=[A-Z]))))?"  # `hf_`, `secretAccess`
    r"(?:token|password|passwd|secret|credentials?|(?:api|access|secret|private|auth)[_-]?key)"
)
_API_KEY: Final = r"--?api[_-]?key"  # vLLM's flag takes several
_QUOTED: Final = r"\"(?:[^\"\\]|\\.)+\"|'(?:[^'\\]|\\.)+'|\\+\"[^\"\\]+\\+\""  # the last in JSON within JSON
_SHELL_WORD: Final = r"(?:'[^']*'|\"(?:[^\"\\]|\\.)*\"|\\.|[^\s'\"\\])+"
_NO_SECRET: Final = (
    r"(?!['\"]?<|(?:None|null|True|False|true|false|\d+(?:\.\d+)?)(?![\w.-]))"  # `<s>` is a token of text
)
_NO_PROSE: Final = r"(?!-|(?:is|and|or|in|has|must|may|cannot|needs)\s)"  # `--api-key is set by Plimsoll`
_WORD: Final = rf"(?:{_QUOTED}|[^\s,;&'\"()\[\]])+"
_VALUES: Final = tuple(
    re.compile(pattern, re.IGNORECASE | re.DOTALL)
    for pattern in (
        # "--api-key", "k1", "k2" and "--hf-token", "x"
        rf"(?P<name>(?P<quote>[\"']){_API_KEY}(?P=quote)\s*,\s*)(?:{_QUOTED})(?:\s*,\s*(?![\"']-)(?:{_QUOTED}))*",
        rf"(?P<name>(?P<quote>[\"'])--?{_NAME}(?P=quote)\s*,\s*)(?![\"']-)(?:{_QUOTED})",
        # "--hf-token=x y" and '--hf-token=x y', where the shell writes a quote as '"'"'
        rf"(?P<name>\"--?{_NAME}=){_NO_SECRET}(?:[^\"\\]|\\.)+(?=\"|\\?\Z)",
        rf"(?P<name>'--?{_NAME}=){_NO_SECRET}(?:\\{{0,8}}'\"'\"'|[^'\\]|\\.)+(?='|\\?\Z)",
        # --api-key k1 k2, --hf-token x and --hf-token=x
        rf"(?P<name>(?<![\w.'\"-]){_API_KEY}\s+){_NO_SECRET}{_NO_PROSE}{_SHELL_WORD}(?:[ \t]+(?!-){_SHELL_WORD})*",
        rf"(?P<name>(?<![\w.'\"-])--?{_NAME}(?:=|\s+{_NO_PROSE})){_NO_SECRET}{_SHELL_WORD}",
        rf"(?P<name>(?<=['\"])--?{_NAME}\s+){_NO_SECRET}{_NO_PROSE}[^\s'\"]+",
        # "api_key": "x", "api_key": ["k1", "k2"]
        rf"(?P<name>(?P<quote>\\{{0,8}}[\"']){_NAME}(?P=quote)\s*:\s*(?P<list>[\[(]\s*)?){_NO_SECRET}(?:{_QUOTED})"
        rf"(?(list)(?:\s*,\s*(?:{_QUOTED}))*)",
        # HF_TOKEN=x, hf_token='x', api_key=['k1', 'k2']
        rf"(?P<name>(?<![\w.-]){_NAME}=(?P<list>[\[(]\s*)?){_NO_SECRET}{_WORD}"
        rf"(?(list)(?:\s*,\s*{_WORD})*)",
        # https://user:password@host, but not https://host:port/x@y
        r"(?P<name>(?<![a-z0-9+.-])[a-z][a-z0-9+.-]*://)"
        r"(?:[^\s/@'\":]*:(?!//|\d{1,5}[/?#])(?:[^\s'\":]|:(?!//))*|[^\s/'\"]+)(?=@)",
        r"(?P<name>authorization\\*[\"']?\s*[:=,]\s*\\*[\"']?(?:basic|bearer|digest|negotiate|token)\s+)[^\s'\"\\]+",
        r"(?P<name>\bBearer\s+)[A-Za-z0-9._~+/=-]{8,}",
        r"(?P<name>\bBasic\s+)(?!(?-i:[A-Z]?[a-z]+)\b)[A-Za-z0-9+/=_-]{6,}",
    )
)
_TOKENS: Final = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|AKIA[A-Z0-9]{16}"
    r"|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]+)"
)
_HINT: Final = re.compile(
    r"token|passw|secret|credential|key|://|bearer|basic|authorization|hf_|sk-|gh[pousr]_|AKIA|eyJ", re.IGNORECASE
)


def redact(text: str) -> str:
    """The text with `***` in the place of each secret that it recognises."""
    if _HINT.search(text) is None:
        return text
    for pattern in _VALUES:
        text = pattern.sub(rf"\g<name>{REDACTED}", text)
    without_tokens = _TOKENS.sub(REDACTED, text)
    return text if without_tokens == text else redact(without_tokens)  # a flag may stand behind a token
