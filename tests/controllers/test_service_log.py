"""Each line of the operator's log that is about a service names it."""

from __future__ import annotations

import ast
import logging
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest

import plimsoll
from plimsoll.telemetry.json_logging import JsonFormatter
from plimsoll.telemetry.service_log import ServiceLog

PACKAGE = Path(plimsoll.__file__).parent
MODULES = [path for layer in ("controllers", "adapters") for path in sorted((PACKAGE / layer).rglob("*.py"))]
# Lines about the process, a gateway or a namespace.
WITHOUT_SERVICE = {
    "admission review without an answer",
    "another release manages a namespace; its services are left alone",
    "cannot hold the lease of a namespace",
    "cannot read the list of namespaces with services",
    "cannot read the webhook's certificate",
    "cannot record a namespace with services",
    "cannot renew the lease of a namespace",
    "took over a namespace",
    "probe fails",
    "batch decision failed; deciding each service separately",
    "cannot list InferenceServices",
    "cannot list objects of an optional kind; trying again",
    "cannot list InferenceServices; trying again",
    "cannot list the checkpoints; learned state starts empty",
    "cannot read the certificate of the gRPC server",
    "cannot use the Secret of internalTls.secretName",
    "cannot write the lease",
    "certificate of internalTls.secretName loaded",
    "gateway signals cannot be read with TLS",
    "component failed; restarting it",
    "certificate of the gRPC server loaded",
    "objects of an optional kind can be applied",
    "objects of an optional kind cannot be applied",
    "the cluster lacks an optional kind",
    "gateway signals are not available",
    "gateway signals cannot be parsed",
    "lease acquired; this replica leads",
    "lease lost; this replica no longer leads, and waits for the lease",
    "metrics store does not answer; unreachable engines stay unknown",
    "operator stopped",
    "stop requested",
    "watch failed; listing again",
    "webhook certificate loaded",
}


def test_log_line_holds_no_secret() -> None:
    record = logging.LogRecord("plimsoll", logging.INFO, "", 0, "GET https://me:s3cr3t@hub/x failed", None, None)
    record.__dict__ |= {"error": ValueError("api_key=s3cr3t"), "args_of": ["--hf-token s3cr3t", {"a": "token=s3cr3t"}]}
    try:
        raise RuntimeError("HF_TOKEN=s3cr3t")
    except RuntimeError as error:
        record.exc_info = (type(error), error, error.__traceback__)
    line = JsonFormatter().format(record)
    assert "s3cr3t" not in line
    assert orjson.loads(line)["message"] == "GET https://***@hub/x failed"


def _log_calls(path: Path) -> Iterator[ast.Call]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            target = node.func.value
            if (
                isinstance(target, ast.Name)
                and target.id in ("log", "logger", "logging")
                and node.func.attr != "basicConfig"
            ):
                yield node


def test_every_log_call_names_its_service() -> None:
    unnamed = set()
    for path in MODULES:
        source = path.read_text()
        messages = {
            node.targets[0].id: node.value.value
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and isinstance(node.value, ast.Constant)
        }
        for call in _log_calls(path):
            assert isinstance(call.func, ast.Attribute)
            place = f"{path.relative_to(PACKAGE)}:{call.lineno}"
            assert call.func.attr != "getLogger", f"{place}: use ServiceLog"
            assert not any(keyword.arg in ("extra", "service") for keyword in call.keywords), place
            service, message = call.args[-2:]
            assert not isinstance(service, ast.Constant) or service.value is None, f"{place}: no service"
            if isinstance(service, ast.Constant):
                unnamed.add(messages[message.id] if isinstance(message, ast.Name) else ast.literal_eval(message))
    assert unnamed == WITHOUT_SERVICE


def test_log_line_has_service_fields_and_caller(caplog: pytest.LogCaptureFixture) -> None:
    log = ServiceLog("plimsoll.test")
    with caplog.at_level(logging.DEBUG, "plimsoll.test"):
        log.info(("team", "chat"), "100% done", tier="decode")
        log.warning(None, "watch failed", resource="pods")
        try:
            raise ValueError("broken")
        except ValueError:
            log.exception(("team", "chat"), "failed")
    lines = [orjson.loads(JsonFormatter().format(record)) for record in caplog.records]
    assert [line.get("service") for line in lines] == ["team/chat", None, "team/chat"]
    assert (lines[0]["message"], lines[0]["tier"], lines[0]["level"]) == ("100% done", "decode", "info")
    assert "ValueError: broken" in lines[2]["exception"]
    assert {record.funcName for record in caplog.records} == {"test_log_line_has_service_fields_and_caller"}


def test_log_below_level_is_not_written(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "plimsoll.test"):
        ServiceLog("plimsoll.test").debug(("team", "chat"), "input")
    assert caplog.records == []
