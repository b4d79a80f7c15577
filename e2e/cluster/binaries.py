"""The programs of the cluster, built from their published Go modules.

Problem: release downloads are not to be had everywhere, module proxies are. Idea: module files pin everything
(`kubernetes/` also holds kind and helm, which share its packages; the others clash with those versions and have their
own). A program is built when it is asked for, so the API tests do not pay for a kubelet; Go's build cache
makes a later, larger request cost only the difference. A stamp of the module files tells when programs are stale.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster import flux, keda, prometheus_adapter
from e2e.cluster.settings import BIN, HERE, KUBERNETES
from e2e.cluster.shell import CommandFailed, run, stage

_VERSION = "k8s.io/component-base/version"
_MAJOR, _MINOR = KUBERNETES.removeprefix("v").split(".")[:2]
_KUBERNETES_FLAGS = (
    f"-X {_VERSION}.gitVersion={KUBERNETES} -X {_VERSION}.gitMajor={_MAJOR} -X {_VERSION}.gitMinor={_MINOR}"
    f" -X {_VERSION}.gitTreeState=clean -X k8s.io/client-go/pkg/version.gitVersion={KUBERNETES}"
)
_CONTAINERD = "github.com/containerd/containerd/v2"


@dataclass(frozen=True)
class Module:
    """One module file and what is built from it: program name -> package, linker flags, build tags.

    source: makes the folder to build in, by the rules of a file or package of that name; else `folder` has the
    module file.
    """

    folder: str
    packages: dict[str, str]
    flags: str = ""
    tags: str = ""
    source: Callable[[], Path] | None = None

    @property
    def stamp(self) -> str:
        """Changes with every source and version of the module."""
        digest = hashlib.sha256(f"{self.flags} {self.tags}".encode())
        rules = HERE / self.folder
        for path in sorted(
            p for p in (rules.rglob("*") if rules.is_dir() else [rules]) if p.suffix in {".go", ".mod", ".sum", ".py"}
        ):
            digest.update(path.read_bytes())
        return digest.hexdigest()[:16]


MODULES = (
    Module(
        "kubernetes",
        {
            **{
                f"kube-{part}": f"k8s.io/kubernetes/cmd/kube-{part}"
                for part in ("apiserver", "controller-manager", "scheduler", "proxy")
            },
            **{name: f"k8s.io/kubernetes/cmd/{name}" for name in ("kubelet", "kubeadm", "kubectl")},
            "coredns": "./coredns",
            "pause": "./pause",
            "kind": "sigs.k8s.io/kind",
            "helm": "helm.sh/helm/v4/cmd/helm",
            "kwok": "sigs.k8s.io/kwok/cmd/kwok",
        },
        flags=_KUBERNETES_FLAGS,
    ),
    Module("etcd", {"etcd": "go.etcd.io/etcd/server/v3"}),
    Module(
        "containerd",
        {name: f"{_CONTAINERD}/cmd/{name}" for name in ("containerd", "containerd-shim-runc-v2", "ctr")},
        flags=f"-X {_CONTAINERD}/version.Version=v2.4.2",
        tags="no_btrfs no_zfs no_devmapper no_aufs",
    ),
    Module("keda.py", {"keda-operator": "./cmd/operator", "keda-adapter": "./cmd/adapter"}, source=keda.source),
    Module("prometheus_adapter.py", {"prometheus-adapter": "./cmd/adapter"}, source=prometheus_adapter.source),
    Module("flux", {"kustomize-controller": "."}, source=flux.kustomize_controller),
    Module("flux", {"source-controller": "."}, source=flux.source_controller),
    Module("policies", {"policy-controller": "."}),
)


def present() -> frozenset[str]:
    """Names of programs that are built and up to date."""
    return frozenset(name for module in MODULES for name in module.packages if _current(module, name))


def adopt(names: Iterable[str]) -> None:
    """Use programs installed on this machine in place of our own builds."""
    BIN.mkdir(parents=True, exist_ok=True)
    for name in names:
        installed = shutil.which(name)
        if installed is None:
            raise CommandFailed(f"{name} is not installed")
        (BIN / name).unlink(missing_ok=True)
        (BIN / name).symlink_to(installed)


def ensure(names: Iterable[str]) -> None:
    """Build what is missing; raises Failed for a name that is unknown or does not build."""
    requested = set(names)
    if unknown := requested - {name for module in MODULES for name in module.packages}:
        raise CommandFailed(f"no such program: {', '.join(sorted(unknown))}")
    for module in MODULES:
        missing = sorted(name for name in requested & set(module.packages) if not _current(module, name))
        if missing:
            if shutil.which("go") is None:
                raise CommandFailed(f"Go 1.26 or newer is needed to build {', '.join(missing)}.")
            with stage(f"building {', '.join(missing)}"):
                _build(module, missing)


def _current(module: Module, name: str) -> bool:
    stamp = BIN / ".stamps" / name
    return (BIN / name).exists() and stamp.exists() and stamp.read_text() == module.stamp


def _build(module: Module, names: list[str]) -> None:
    """One `go build` for all, into a folder of its own: a broken build leaves no half program behind."""
    stamps, fresh = BIN / ".stamps", BIN / ".new"
    stamps.mkdir(parents=True, exist_ok=True)
    fresh.mkdir(exist_ok=True)
    packages = [module.packages[name] for name in names]
    several = len(names) > 1  # then Go names each program by the last part of its package
    built = [fresh / (package.rpartition("/")[2] if several else names[0]) for package in packages]
    target = f"{fresh}/" if several else built[0]
    flags = ["-trimpath", "-tags", module.tags, "-ldflags", f"-s -w {module.flags}"]
    folder = module.source() if module.source else HERE / module.folder
    run("go", "build", *flags, "-o", target, *packages, cwd=folder, env={"CGO_ENABLED": "0"})
    for name, program in zip(names, built, strict=True):
        program.replace(BIN / name)
        (stamps / name).write_text(module.stamp)
