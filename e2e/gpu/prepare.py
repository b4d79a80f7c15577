"""Here, with Docker and Go: everything the node needs, as three archives, and those as folders that calls carry.

Programs are those of `e2e/cluster`, the Kubernetes ones linked into one file. Network tools, runc and the pod network
are Debian's packages, unpacked into a folder of their own. Images are those of `e2e/cluster`, as files without what the
machine makes again. The engine's archive is an unpacked vLLM with what it needs, which the user gives.
"""

from __future__ import annotations

import filecmp
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from e2e.cluster import binaries, images
from e2e.cluster.settings import BIN as CLUSTER_BIN
from e2e.cluster.settings import HERE as CLUSTER_FILES
from e2e.cluster.settings import KUBERNETES
from e2e.cluster.shell import output, print_line, run, stage
from e2e.gpu.parts import send
from e2e.gpu.settings import CHECKOUT, RELEASE, SYSTEM

HERE: Final = Path(__file__).resolve().parent
_PROGRAMS: Final = ("etcd", "containerd", "containerd-shim-runc-v2", "ctr", "pause")
_PACKAGES: Final = (
    "iptables", "iproute2", "conntrack", "runc", "containernetworking-plugins", "jq", "zstd",
    "libxtables12", "libnftnl11", "libmnl0", "libnfnetlink0", "libip4tc2", "libip6tc2", "libnetfilter-conntrack3",
    "libbpf1", "libelf1", "libcap2", "libseccomp2", "libbsd0", "libmd0", "libjq1", "libonig5", "liblz4-1",
)  # fmt: skip
_NETWORK_PLUGINS: Final = ("ptp", "host-local", "portmap", "loopback", "bridge")
_LIBRARIES: Final = "usr/lib/x86_64-linux-gnu"
_IMAGES: Final = ("operator", "envoy")
_REMADE: Final = (
    "*/__pycache__", "dev/*", "var/cache", "var/lib/apt/lists", "usr/share/doc", "usr/share/man", "usr/share/locale",
)  # fmt: skip
_UNUSED: Final = (
    "usr/bin/perl*", "usr/bin/localedef", "usr/bin/gpgv", "usr/share/perl*", "usr/share/zoneinfo",
    f"{_LIBRARIES}/gconv", f"{_LIBRARIES}/perl*", "var/lib/dpkg",
)  # fmt: skip
_LEVEL: Final = "-16"  # of zstd
_ENGINE_PACKAGES: Final = ("vllm", "nixl")  # vLLM starts without the second, and then transfers no KV blocks


def prepare(target: Path, work: Path, site: Path | None) -> None:
    """Folders below `target`; `work` keeps what was built. `site`: vLLM's, or none for a rehearsal.

    Raises FileNotFoundError for a site that lacks a package.
    """
    if site is not None:
        check_site(site)
    work.mkdir(parents=True, exist_ok=True)
    node = _collect_node(work / "node")
    archives = {
        "engine": _archive(_engine_folder(site, work), work / "engine.tar.zst"),
        "node": _archive(node, work / "node.tar.zst"),
        "images": _archive(_collect_images(work / "images"), work / "images.tar.zst"),
    }
    tools = work / "tools"
    tools.mkdir(exist_ok=True)
    shutil.copy2(node / "debian/usr/bin/zstd", tools / "zstd")
    shutil.copy2(node / "debian" / _LIBRARIES / "liblz4.so.1", tools / "liblz4.so.1")
    folders = send(archives, tools, target)
    (folders[-1] / "chart.yaml").write_text(render_chart())
    for folder in folders:
        size = sum(path.stat().st_size for path in folder.iterdir())
        print_line(f"{folder}: {size / 1e6:.1f} MB: {', '.join(sorted(path.name for path in folder.iterdir()))}")


def _collect_node(folder: Path) -> Path:
    with stage("the node's programs"):
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "bin").mkdir(parents=True)
        binaries.ensure([*_PROGRAMS, "helm"])
        for name in _PROGRAMS:
            shutil.copy2(CLUSTER_BIN / name, folder / "bin" / name)
        _link_node(folder / "bin" / "node", folder.parent)
        packages = folder.parent / "packages"
        packages.mkdir(exist_ok=True)
        run("apt-get", "download", *_PACKAGES, cwd=packages)
        for package in sorted(packages.glob("*.deb")):
            run("dpkg-deb", "-x", package, folder / "debian")
        for name in ("usr/share", "etc", f"{_LIBRARIES}/tc"):
            shutil.rmtree(folder / "debian" / name, ignore_errors=True)
        for plugin in (folder / "debian/usr/lib/cni").iterdir():
            if plugin.name not in _NETWORK_PLUGINS:
                plugin.unlink()
    return folder


def _link_node(target: Path, work: Path) -> None:
    """Kubernetes' programs as one: node.go is linked as if it lay in the module of e2e/cluster."""
    module = CLUSTER_FILES / "kubernetes"
    overlay = work / "overlay.json"
    overlay.write_text(json.dumps({"Replace": {str(module / "node/main.go"): str(HERE / "node.go")}}))
    flags = next(one.flags for one in binaries.MODULES if one.folder == "kubernetes")
    arguments = ("-overlay", overlay, "-trimpath", "-ldflags", f"-s -w {flags}", "-o", target, "./node")
    run("go", "build", *arguments, cwd=module, env={"CGO_ENABLED": "0"})


def _collect_images(folder: Path) -> Path:
    """The files of the images and their configurations; equal files of two images are one."""
    images.ensure(_IMAGES)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for image in images.IMAGES:
        if image.name in _IMAGES:
            with stage(f"files of the image {image.name}"):
                _export(image.reference, folder / image.name)
                inspected: list[dict[str, Any]] = json.loads(output("docker", "image", "inspect", image.reference))
                (folder / f"{image.name}.json").write_text(json.dumps(inspected[0]["Config"]))
    for path in _files(folder / "envoy"):
        twin = folder / "operator" / path.relative_to(folder / "envoy")
        if twin.is_file() and not twin.is_symlink() and filecmp.cmp(path, twin, shallow=False):
            path.unlink()
            os.link(twin, path)
    return folder


def _export(reference: str, folder: Path) -> None:
    folder.mkdir()
    container = output("docker", "create", reference)
    try:
        excluded = [f"--exclude={pattern}" for pattern in (*_REMADE, *_UNUSED)]
        unpack = ["tar", "--numeric-owner", "--anchored", "--wildcards", *excluded, "-C", str(folder), "-xpf", "-"]
        with subprocess.Popen(["docker", "export", container], stdout=subprocess.PIPE) as export:
            subprocess.run(unpack, stdin=export.stdout, check=True)
    finally:
        run("docker", "rm", container)


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def check_site(site: Path) -> None:
    """Raises FileNotFoundError unless the site has each package that engines import."""
    if missing := [name for name in _ENGINE_PACKAGES if not (site / name).is_dir()]:
        raise FileNotFoundError(f"{site} lacks the package {' and '.join(missing)}")


def _engine_folder(site: Path | None, work: Path) -> Path:
    folder = work / "engine"
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "site").mkdir(parents=True)
    if site:
        shutil.copytree(site, folder / "site", symlinks=True, copy_function=os.link, dirs_exist_ok=True)
    return folder


def _archive(folder: Path, target: Path) -> Path:
    with stage(f"archive {target.name}"):
        pack = [
            "tar",
            "--numeric-owner",
            "-I",
            f"zstd {_LEVEL} -T0 --long=27 -q",
            "-C",
            str(folder),
            "-cf",
            str(target),
            ".",
        ]
        run(*pack)
    return target


def render_chart() -> str:
    """All objects of the chart, with the values of the node."""
    chart, values = CHECKOUT / "charts/plimsoll", HERE / "values.yaml"
    flags = ("--kube-version", KUBERNETES, "--skip-tests")
    return output(CLUSTER_BIN / "helm", "template", RELEASE, chart, "-n", SYSTEM, "-f", values, *flags)
