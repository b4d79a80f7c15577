"""Shell completion: of `kubectl plimsoll` in every shell that kubectl completes, and of `plimsoll` in bash.

kubectl runs the program `kubectl_complete-plimsoll` with the words of the command line. It prints a candidate per line,
and a last line `:N` with N = 4, or 0 where a file name is expected. Candidates come from the parser that reads the
options, and names of services from the cluster.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from plimsoll.cli import cluster, kubeconfig
from plimsoll.cli.json_access import get_text
from plimsoll.core.errors import PlimsollError

NO_FILES, FILES = ":4", ":0"
CLUSTER_SECONDS: Final = 2.0
_SERVICE_VERBS: Final = ("status", "explain", "doctor")
_FILE_VALUES: Final = ("FILE", "MANIFEST", "PROFILE")
_BASH: Final = """\
_plimsoll_complete() {
    local lines
    mapfile -t lines < <(kubectl_complete-plimsoll "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
    [ "${#lines[@]}" -gt 0 ] || return
    [ "${lines[-1]}" = ":0" ] && compopt -o default
    COMPREPLY=("${lines[@]::${#lines[@]}-1}")
}
complete -F _plimsoll_complete plimsoll
"""

Names = Callable[[str | None], Iterable[str]]


@dataclass
class _Line:
    """The command line before the word at the cursor. value_of: the option whose value that word is, or None."""

    parser: argparse.ArgumentParser
    value_of: argparse.Action | None = None
    positionals: int = 0
    namespace: str | None = None


def main() -> int:
    """The program `kubectl_complete-plimsoll`."""
    from plimsoll.cli.main import build_parser

    logging.disable()  # clients of the cluster log, and the terminal has the user's command line
    print("\n".join(candidates(build_parser(), sys.argv[1:], _service_names)))
    return 0


def run(_: argparse.Namespace) -> int:
    """Print the script for bash."""
    print(_BASH, end="")
    return 0


def candidates(parser: argparse.ArgumentParser, words: Sequence[str], service_names: Names) -> list[str]:
    """Return the lines for kubectl. words: the last one is being completed. service_names: of a namespace."""
    *before, current = words or [""]
    line = _read(parser, before)
    directive = NO_FILES
    if line.value_of is not None:
        found: Iterable[str] = line.value_of.choices or ()
        if any(kind in str(line.value_of.metavar) for kind in _FILE_VALUES):
            directive = FILES
    elif current.startswith("-"):
        found = [name for action in line.parser._actions for name in action.option_strings if name.startswith("--")]
    else:
        found = _words(line, service_names)
    return [*sorted(one for one in found if one.startswith(current)), directive]


def _read(parser: argparse.ArgumentParser, words: Sequence[str]) -> _Line:
    """Follow the words through verbs and options."""
    line = _Line(parser)
    for word in words:
        if line.value_of is not None:
            if "--namespace" in line.value_of.option_strings:
                line.namespace = word
            line.value_of = None
        elif word.startswith("-"):
            name = word.partition("=")[0]
            option = next((one for one in line.parser._actions if name in one.option_strings), None)
            line.value_of = option if option is not None and option.nargs != 0 and "=" not in word else None
        elif word in (verbs := _verbs(line.parser)):
            line = _Line(verbs[word])
        else:
            line.positionals += 1
    return line


def _words(line: _Line, service_names: Names) -> Iterable[str]:
    """Verbs, or names of services for the first argument of a verb that takes one."""
    verbs = _verbs(line.parser)
    if not verbs and line.positionals == 0 and line.parser.prog.split()[-1] in _SERVICE_VERBS:
        return service_names(line.namespace)
    return verbs


def _verbs(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def _service_names(namespace: str | None) -> list[str]:
    """Names of services; none if the cluster does not answer in time."""

    async def names() -> list[str]:
        async with cluster.connect(None) as kube:
            services = await cluster.list_services(kube, namespace or kubeconfig.current_namespace(None))
        return [get_text(one, "metadata", "name") or "" for one in services]

    try:
        return asyncio.run(asyncio.wait_for(names(), CLUSTER_SECONDS))
    except (PlimsollError, TimeoutError):  # a completion has no place for a message
        return []
