"""Docker on a machine that has none: Debian's packages and a daemon of our own.

Only ever called with a plan that says so, and the plan never says so where a Docker daemon answers. The daemon outlives
this command, so what it needs lies where it does not go away with a cache or a checkout.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping

from e2e.cluster.planning import Plan
from e2e.cluster.settings import BIN, CACHE, HERE, LENIENT_RUNC
from e2e.cluster.shell import CommandFailed, run, stage, succeeds, wait_for

START_SECONDS = 60


def ensure_docker(plan: Plan) -> None:
    """Install packages and start the daemon; raises Failed when it does not answer."""
    if plan.packages:
        with stage(f"installing {' '.join(plan.packages)}"):
            run("apt-get", "update", "-qq")
            run(
                "apt-get",
                "install",
                "-y",
                "-qq",
                "--no-install-recommends",
                *plan.packages,
                env={"DEBIAN_FRONTEND": "noninteractive"},
            )
    if plan.daemon and not succeeds("docker", "info"):  # where there is an init system, the package has started it
        with stage("starting Docker"):
            _start(plan.lenient_runc)


def daemon_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without our own programs: Docker starts the first containerd and shim on its path.

    Those that are built for the node are of another version, and only one of the two may be there when it starts.
    """
    environment = (folder for folder in environ["PATH"].split(os.pathsep) if folder != str(BIN))
    return {**environ, "PATH": os.pathsep.join(environment)}


def _start(lenient_runc: bool) -> None:
    config = {"storage-driver": "overlay2", "ip6tables": False}
    CACHE.mkdir(parents=True, exist_ok=True)
    if lenient_runc:
        shutil.copy2(HERE / "node" / "runc-lenient", LENIENT_RUNC)
        config |= {"runtimes": {"lenient": {"path": LENIENT_RUNC}}, "default-runtime": "lenient"}
    (CACHE / "daemon.json").write_text(json.dumps(config, indent=2))
    log = CACHE / "dockerd.log"
    with log.open("ab") as out:
        daemon = subprocess.Popen(
            ["dockerd", "--config-file", str(CACHE / "daemon.json")],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
            env=daemon_environment(os.environ),
        )
    try:
        wait_for(lambda: daemon.poll() is not None or succeeds("docker", "info"), "the Docker daemon", START_SECONDS)
        if daemon.poll() is not None:
            raise CommandFailed("the Docker daemon ended at once")
    except CommandFailed as error:
        last = "\n".join(log.read_text().splitlines()[-20:])
        raise CommandFailed(f"{error}\n{last}\nwhole log: {log}") from error
