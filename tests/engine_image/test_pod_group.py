"""An engine of several pods: their command lines, and when a worker ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import pytest

from launcher import command, engine_info, pod_group, settings
from launcher.settings import PodGroup, SettingsError
from tests.engine_image.middleware_harness import CONTRACT

POD = {"PLIMSOLL_ROLE": "serve", "PLIMSOLL_MODEL": "org/model"}
LEADER = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "0", "LWS_LEADER_ADDRESS": "chat-serve-0.chat-serve-0.team"}
WORKER = {**LEADER, "LWS_WORKER_INDEX": "1"}


def argv(**variables: str) -> list[str]:
    return command.engine_command(settings.read({**POD, **variables}, CONTRACT), CONTRACT, cpu=False)


def test_group_argv_connects_pods_without_ray() -> None:
    flags = ["--distributed-executor-backend", "mp", "--nnodes", "2", "--node-rank"]
    address = ["--master-addr", LEADER["LWS_LEADER_ADDRESS"]]
    at = argv(**LEADER).index("--distributed-executor-backend")
    assert argv(**LEADER)[at : at + 8] == [*flags, "0", *address]
    assert argv(**WORKER)[at : at + 9] == [*flags, "1", *address, "--headless"]
    assert "--headless" not in argv(**LEADER)


SIZES = ["--tensor-parallel-size", "4", "--pipeline-parallel-size", "2"]


def test_group_argv_takes_the_sizes_of_the_operator() -> None:
    found = argv(**LEADER, PLIMSOLL_DEFAULT_ARGS=json.dumps(SIZES))
    assert [found.count(flag) for flag in (SIZES[0], SIZES[2])] == [1, 1]


@pytest.mark.parametrize("name", ["PLIMSOLL_DEFAULT_ARGS", "PLIMSOLL_ARGS"])
@pytest.mark.parametrize("flag", ["--tensor-parallel-size=8", "-tp", "--nnodes", "-n4", "-asc", "--master_port", "-dp"])
def test_group_argv_rejects_another_shape(name: str, flag: str) -> None:
    """Also from the chart's defaults for all engines."""
    variables = {"PLIMSOLL_DEFAULT_ARGS": json.dumps(SIZES)}
    more = [flag, *(() if "=" in flag else ("2",))]
    variables[name] = json.dumps([*json.loads(variables.get(name, "[]")), *more])
    with pytest.raises(SettingsError, match=f"{flag} is set by Plimsoll for an engine of several nodes"):
        argv(**LEADER, **variables)
    assert flag in argv(**variables)


@pytest.mark.parametrize("variables", [{}, {"LWS_GROUP_SIZE": "1", "LWS_WORKER_INDEX": "0"}])
def test_group_of_one_pod_has_no_flags(variables: dict[str, str]) -> None:
    assert argv(**variables) == argv()
    assert settings.read({**POD, **variables}, CONTRACT).group is None


def test_settings_tell_leader_from_worker() -> None:
    assert not settings.read({**POD, **LEADER}, CONTRACT).is_worker
    read = settings.read({**POD, **WORKER}, CONTRACT)
    assert (read.is_worker, read.group) == (True, PodGroup(2, 1, LEADER["LWS_LEADER_ADDRESS"]))


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        ({**WORKER, "LWS_WORKER_INDEX": "2"}, "LWS_WORKER_INDEX"),
        ({**WORKER, "LWS_GROUP_SIZE": "two"}, "LWS_GROUP_SIZE"),
        ({"LWS_GROUP_SIZE": "2"}, "LWS_WORKER_INDEX"),
        ({**WORKER, "LWS_LEADER_ADDRESS": ""}, "LWS_LEADER_ADDRESS is not set"),
    ],
)
def test_settings_invalid_group_names_its_variable(variables: dict[str, str], name: str) -> None:
    with pytest.raises(SettingsError, match=name):
        settings.read({**POD, **variables}, CONTRACT)


def test_engine_info_counts_accelerators_of_all_pods() -> None:
    read = settings.read(
        {**POD, **LEADER, "PLIMSOLL_RUNTIME": "simulated", "PLIMSOLL_ARGS": '["--tensor-parallel-size","4"]'}, CONTRACT
    )
    assert engine_info.from_settings(read, "").accelerators == 8
    info = engine_info.from_settings(settings.read({**POD, **LEADER}, CONTRACT), "0.32.0")
    engine_info.detect_accelerators(info, ("printf", "NVIDIA H100\\nNVIDIA H100\\n"))
    assert info.accelerators == 4


async def test_worker_waits_for_repeated_absence_of_leader() -> None:
    answers: Iterator[bool] = iter([True, False, False, True, False, False, False])
    calls = 0

    async def is_there() -> bool:
        nonlocal calls
        calls += 1
        return next(answers)

    await pod_group.wait_until_leader_ended(is_there, poll_seconds=0.0)
    assert calls == 7


async def test_leader_is_there_while_its_port_is_open() -> None:
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    assert await pod_group.accepts_connections("127.0.0.1", port)
    server.close()
    await server.wait_closed()
    assert not await pod_group.accepts_connections("127.0.0.1", port)
