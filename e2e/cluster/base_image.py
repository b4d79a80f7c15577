"""debian:bookworm-slim, made here from Debian's packages where it cannot be pulled.

Besides Debian it carries what this machine needs to reach its package mirrors: their sources and its certificates.
Where the bootstrap program is missing it is unpacked into the cache: a machine whose Docker runs gets no packages.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from e2e.cluster.docker import image_exists
from e2e.cluster.settings import BASE_IMAGE, CACHE
from e2e.cluster.shell import CommandFailed, run, stage
from release import base_images

_SUITE = "bookworm"
_REMOVED_FOLDERS = ("var/cache/apt/archives", "var/lib/apt/lists", "usr/share/doc", "usr/share/man", "usr/share/locale")


def reference() -> str:
    """What the images are built on: the local image, else the published one that a release is built on, by digest."""
    return BASE_IMAGE if image_exists(BASE_IMAGE) else base_images.load()["DEBIAN"]


def ensure() -> None:
    """Make the image if it is not there."""
    if image_exists(BASE_IMAGE):
        return
    with stage(f"making {BASE_IMAGE}"):
        root = CACHE / "rootfs"
        shutil.rmtree(root, ignore_errors=True)
        program, settings = _debootstrap()
        run(program, "--variant=minbase", "--include=ca-certificates", _SUITE, root, env=settings)
        _match_machine(root)
        for folder in _REMOVED_FOLDERS:
            shutil.rmtree(root / folder, ignore_errors=True)
        (root / "var/cache/apt/archives/partial").mkdir(parents=True)
        (root / "var/lib/apt/lists/partial").mkdir(parents=True)
        _import_image(root)
        shutil.rmtree(root)


def _debootstrap() -> tuple[Path, dict[str, str]]:
    """The program and the environment it wants."""
    if installed := shutil.which("debootstrap"):
        return Path(installed), {}
    unpacked = CACHE / "debootstrap"
    if not unpacked.exists():
        folder, lists = CACHE / "deb", CACHE / "apt-lists"
        for environment in (folder, lists / "partial"):
            environment.mkdir(parents=True, exist_ok=True)
        own_lists = ("-o", f"Dir::State::lists={lists}", "-o", "APT::Sandbox::User=root")
        run("apt-get", *own_lists, "update", "-qq")
        run("apt-get", *own_lists, "download", "debootstrap", cwd=folder)
        run("dpkg-deb", "-x", next(folder.glob("debootstrap_*.deb")), unpacked)
    return unpacked / "usr/sbin/debootstrap", {"DEBOOTSTRAP_DIR": str(unpacked / "usr/share/debootstrap")}


def _match_machine(root: Path) -> None:
    """The machine's Debian sources (others need keys the image lacks) and its own certificates."""
    for source in Path("/etc/apt/sources.list.d").glob("debian*"):
        shutil.copy(source, root / "etc/apt/sources.list.d")
        (root / "etc/apt/sources.list").write_text("")
    certificates = Path("/usr/local/share/ca-certificates")
    if certificates.is_dir():
        shutil.copytree(certificates, root / "usr/local/share/ca-certificates", dirs_exist_ok=True)
    run("chroot", root, "update-ca-certificates", env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"})


def _import_image(root: Path) -> None:
    with subprocess.Popen(["tar", "-C", str(root), "-c", "."], stdout=subprocess.PIPE) as tar:
        assert tar.stdout is not None
        run("docker", "import", "-", BASE_IMAGE, stdin=tar.stdout.fileno())
    if tar.returncode != 0:
        raise CommandFailed(f"packing {root} failed ({tar.returncode})")
