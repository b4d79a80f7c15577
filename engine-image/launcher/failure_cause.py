"""Why the engine failed, from its log.

Problem: vLLM logs the error of a worker or of its engine core first. Then the API server's traceback follows, some 4 KB
whose last line only points upwards. Kubernetes keeps the last 2 KB of a log, so the cause is lost.

Idea: remember the last line that ends a traceback and does not point elsewhere, separately for the processes that do
the work. Pydantic and NCCL write the cause on a line after it. A process that is killed writes none. Then the line that
reports its end is the best, and after it the lines of the other processes are only consequences. A driver that is too
old is a warning of Torch, before vLLM says that it finds no device. The launcher writes the line to the pod's
termination message.
"""

from __future__ import annotations

import re
from typing import Final

MAX_CHARS: Final = 1500  # Kubernetes keeps 4096 bytes of a termination message

# "(EngineCore_DP0 pid=70) ERROR 11-26 03:00:00 [core.py:866] " and its parts, each of which may be missing.
_PREFIX: Final = re.compile(
    r"^(?:\((?P<process>[^)]{1,80}) pid=\d+\) )?(?:(?P<level>[A-Z]+) [-\d]+ [:\d]+ \[[^\]]{1,80}\] )?"
)
_COLOUR: Final = re.compile(r"\x1b\[[\d;]{0,16}m")
_ERROR: Final = re.compile(  # with bounds, because a long line would take it milliseconds
    r"(?:[A-Za-z_]\w{0,80}\.){0,9}[A-Z]\w{0,80}(?:Error|Exception|Interrupt|Exit)\b(?:: .*)?$"
    r"|(?:[A-Za-z_]\w{0,80}\.){1,9}[A-Z]\w{0,80}: .+$"
)
_VALIDATION_ERROR: Final = re.compile(r"(?:\w{1,80}\.){0,9}ValidationError: \d+ validation errors? for ")
_VALIDATED_INPUT: Final = re.compile(r" \[type=\w+, input_value=")  # which may hold anything
_LAST_ERROR: Final = "Last error:"  # NCCL
_POINTS_ELSEWHERE: Final = re.compile(r"root cause|stack trace above|error above|see above|logs? above", re.IGNORECASE)
# Torch warns, and vLLM then only finds no device.
_DEVICE_WARNING: Final = re.compile(r"UserWarning: CUDA initialization: (.+?)(?: \(Triggered internally at .*)?$")
_NO_DEVICE: Final = "Failed to infer device type"
_USAGE_ERROR: Final = re.compile(r"[\w. -]{1,80}: (?=error: )")  # argparse: "vllm serve: error: ..."
_ENDED: Final = re.compile(
    r"(?:engine ?core|worker)\b.*\b(?:died|exited|terminated) unexpectedly|^Fatal Python error: ", re.IGNORECASE
)
_MARKS_OF_END: Final = ("unexpectedly", "Fatal Python error")
_GONE_ON: Final = frozenset({"DEBUG", "INFO", "WARNING"})  # levels of a traceback after which vLLM went on
_WORKING_PROCESS: Final = re.compile(r"EngineCore|Worker")


class FailureCause:
    """The most specific error in the log so far."""

    def __init__(self) -> None:
        self._of_workers = ""
        self._of_others = ""
        self._end_of_worker = ""
        self._device_warning = ""
        self._pointing_elsewhere = ""
        self._continued: str | None = None  # the process whose next lines say more about its error
        self._field: str | None = None  # the field that Pydantic refuses, None outside of its errors

    def observe(self, line: bytes) -> None:
        """Read one line of the engine's log."""
        text = _COLOUR.sub("", line[: 4 * MAX_CHARS].decode("utf-8", "replace")).rstrip()
        prefix = _PREFIX.match(text)
        error = text[prefix.end() :] if prefix else text
        process = (prefix and prefix["process"]) or ""
        usage = _USAGE_ERROR.match(error)
        if process == self._continued and error:
            self._observe_continuation(process, error)
        elif error == _LAST_ERROR:
            self._continued, self._field = process, None
        elif usage is not None:
            self._of_others = error[usage.end() :][:MAX_CHARS]
        elif any(mark in error for mark in _MARKS_OF_END) and (end := _ENDED.search(error)):
            self._end_of_worker = self._end_of_worker or error[end.start() :][:MAX_CHARS]
        elif (warning := _DEVICE_WARNING.search(error)) is not None:
            self._device_warning = self._device_warning or warning[1][:MAX_CHARS]
        elif _ERROR.match(error) is None or (prefix and prefix["level"] in _GONE_ON):
            return
        elif _POINTS_ELSEWHERE.search(error) or _NO_DEVICE in error:
            self._pointing_elsewhere = self._pointing_elsewhere or error[:MAX_CHARS]
        else:
            self._keep(process, error)
            if _VALIDATION_ERROR.match(error):
                self._continued, self._field = process, ""

    def _observe_continuation(self, process: str, line: str) -> None:
        """Read a line after an error. Pydantic writes a field, if the fault is of one, then an indented message."""
        if self._field is not None and not line[0].isspace():
            self._field = f"{line}: "
            return
        self._keep(process, (self._field or "") + _VALIDATED_INPUT.split(line, maxsplit=1)[0].strip())
        self._continued = None

    def _keep(self, process: str, error: str) -> None:
        if _WORKING_PROCESS.search(process):
            self._of_workers = error[:MAX_CHARS]
        else:
            self._of_others = error[:MAX_CHARS]

    @property
    def message(self) -> str:
        """The error of a worker or of the engine core, else its unexpected end, else the error of another process.

        Without any of these, a warning about the driver, else the first error that points elsewhere; "" if the log has
        none.
        """
        return (
            self._of_workers
            or self._end_of_worker
            or self._of_others
            or self._device_warning
            or self._pointing_elsewhere
        )
