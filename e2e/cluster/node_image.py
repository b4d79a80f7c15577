"""The node image: pulled, or made from our binaries; then the few files every node of ours has.

The tag names what went in, so an image that is there is an image that fits, and another one means another cluster.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

from e2e.cluster import binaries
from e2e.cluster.docker import build, image_exists
from e2e.cluster.planning import CONTROL_PLANE, NODE, NodeImageSource
from e2e.cluster.settings import BIN, HERE, KUBERNETES, LENIENT_RUNC, PULLED_NODE_IMAGE
from e2e.cluster.shell import output, run, stage

_PARTS = HERE / "node"
_BUILD_FILES = ("made.Dockerfile", "packages.Dockerfile", "runc-lenient")
_PROGRAMS = (*CONTROL_PLANE, *NODE, "kubectl", "kind")
_PACKAGES_IMAGE = "plimsoll/node-packages"


def tag(source: NodeImageSource) -> str:
    """The image a cluster of this checkout runs on."""
    digest = [_PARTS / name for name in ("Dockerfile", "10-ptp.conflist", "hosts.toml", "audit.yaml")]
    return f"plimsoll/node:{_digest([*digest, HERE / 'kind.yaml'], _base(source))}"


def present(requested: NodeImageSource | None) -> NodeImageSource | None:
    """The source of the node image that is already here; of the wanted source, if there is one."""
    sources = NodeImageSource if requested is None else (requested,)
    return next((source for source in sources if image_exists(tag(source))), None)


def ensure(source: NodeImageSource, lenient_runc: bool) -> str:
    """Make the node image if it is not there; its name. lenient_runc: the node's containerd uses the wrapper."""
    if image_exists(tag(source)):
        return tag(source)
    with stage(f"node image ({source})"):
        if source is NodeImageSource.PULL:
            run("docker", "pull", _base(source))
        elif not image_exists(_base(source)):
            _build_image(_base(source), lenient_runc)
        build(tag(source), _PARTS, args={"BASE": _base(source)})
    return tag(source)


def _base(source: NodeImageSource) -> str:
    if source is NodeImageSource.PULL:
        return PULLED_NODE_IMAGE
    modules = [module for module in binaries.MODULES if not module.packages.keys().isdisjoint(_PROGRAMS)]
    stamps = " ".join(module.stamp for module in modules)
    return f"plimsoll/node-made:{KUBERNETES}-{_digest([_PARTS / name for name in _BUILD_FILES], stamps)}"


def _digest(files: Iterable[Path], more: str) -> str:
    digest = hashlib.sha256(more.encode())
    for path in files:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _build_image(image: str, lenient_runc: bool) -> None:
    """Collect kind's files, the binaries and the control plane's images in one build context."""
    binaries.ensure(_PROGRAMS)
    build(_PACKAGES_IMAGE, _PARTS, file="packages.Dockerfile", network="host")
    with tempfile.TemporaryDirectory() as folder:
        context = Path(folder)
        kind = output("go", "list", "-m", "-f", "{{.Dir}}", "sigs.k8s.io/kind", cwd=HERE / "kubernetes")
        run("cp", "-r", "--no-preserve=ownership", f"{kind}/images/base/files", context / "files")
        run("chmod", "-R", "u+w", context / "files")
        (context / "files/kind/k8s-version").write_text(f"{KUBERNETES}\n")
        (context / "bin").mkdir()
        for name in (*NODE, "kubectl"):
            shutil.copy2(BIN / name, context / "bin" / name)
        for name in ("made.Dockerfile", "runc-lenient"):
            shutil.copy2(_PARTS / name, context / name)
        images = _control_plane_images()
        run("docker", "save", "-o", context / "images.tar", *images)
        runc = LENIENT_RUNC if lenient_runc else "/usr/sbin/runc"
        pause = next(name for name in images if "/pause:" in name)
        build(image, context, file="made.Dockerfile", args={"PACKAGES": _PACKAGES_IMAGE, "RUNC": runc, "PAUSE": pause})


def _control_plane_images() -> list[str]:
    """The images kubeadm will ask for, under the names it will ask by: one static binary each."""
    names = output(BIN / "kubeadm", "config", "images", "list", "--kubernetes-version", KUBERNETES).splitlines()
    for name in names:
        program = name.rsplit("/", 1)[-1].split(":", 1)[0]
        with tempfile.TemporaryDirectory() as folder:
            shutil.copy2(BIN / program, folder)
            base = _PACKAGES_IMAGE if program == "kube-proxy" else "scratch"  # the proxy calls iptables
            entry = f'ENTRYPOINT ["/usr/local/bin/{program}"]' if program in {"pause", "coredns"} else ""
            lines = [
                f"FROM {base}",
                f"COPY {program} /usr/local/bin/",
                "ENV PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
                entry,
            ]
            (Path(folder) / "Dockerfile").write_text("\n".join(lines))
            build(name, Path(folder))
    return names
