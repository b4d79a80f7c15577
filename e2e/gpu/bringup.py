"""A real node from plain processes, with Plimsoll's chart on it: every step is named with its seconds."""

from __future__ import annotations

import contextlib
import ctypes.util
import resource
import secrets
import shutil
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from e2e.cluster.facts import sys_resource
from e2e.cluster.settings import HERE as CLUSTER_FILES
from e2e.gpu import config_files, engine_image, oci
from e2e.gpu.parts import await_unpacked
from e2e.gpu.processes import StepFailed, get, kubectl, log_line, run, start, succeeds, wait_for
from e2e.gpu.scenarios import GPU_LABEL
from e2e.gpu.settings import (
    API_SERVICE_IP,
    BIN,
    CHECKOUT,
    DEBIAN,
    DEVICE_PLUGINS,
    ENGINE,
    GATEWAY_URL,
    IMAGES,
    KUBECONFIG,
    NAMESPACE,
    NODE,
    NODE_IP,
    NODE_PROGRAMS,
    PARTS,
    RELEASE,
    ROOT,
    SERVICE_NETWORK,
    SYSTEM,
    image,
)

_PKI: Final = ROOT / "pki"
_CGROUPS: Final = Path("/sys/fs/cgroup")
_DIRECT: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_COMPILE: Final = "import compileall, sys; [compileall.compile_dir(f, quiet=2, workers=0) for f in sys.argv[1:]]"
_UNPACK_S: Final = 480.0
_START_S: Final = 90.0
_NETWORK_TOOLS: Final = {
    "ip": "bin/ip",
    "conntrack": "usr/sbin/conntrack",
    "jq": "usr/bin/jq",
}
_IPTABLES: Final = tuple(f"{family}tables{verb}" for family in ("ip", "ip6") for verb in ("", "-save", "-restore"))


def up(model: str, simulated: str, fake_gpus: int) -> None:
    """From unpacked parts to a chart that is available and an engine image. Raises StepFailed."""
    await_unpacked("node", _UNPACK_S)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # containers inherit it
    _link_programs()
    _make_network()
    _make_kernel_ready()
    with ThreadPoolExecutor(3) as pool:
        engine = pool.submit(_make_engine_image, model, simulated)
        images = pool.submit(_make_images)
        _start_control_plane()
        _start_node(fake_gpus)
        for made in (images, engine):
            for tar in made.result():
                _import(tar)
    _install_chart()
    wait_for(lambda: allocatable_gpus() > 0, "GPUs in the node's status", _START_S)
    kubectl("label", "node", NODE, f"{GPU_LABEL}={gpu_product()}", "--overwrite")
    log_line(f"{allocatable_gpus()} GPUs are allocatable: {gpu_product()}")


def _link_programs() -> None:
    for name in NODE_PROGRAMS:
        _link(BIN / name, BIN / "node")
    for name, program in _NETWORK_TOOLS.items():
        _write_program(BIN / name, config_files.network_tool(program, ""))
    for variant in ("nft", "legacy"):
        for name in _IPTABLES:
            _write_program(BIN / name, config_files.network_tool(f"usr/sbin/xtables-{variant}-multi", name))
        if succeeds(BIN / "iptables", "-t", "nat", "-L", "-n"):
            break
    else:
        raise StepFailed("iptables does not work here, neither nft nor legacy")
    if ctypes.util.find_library("seccomp") is None and not Path("/usr/lib/x86_64-linux-gnu/libseccomp.so.2").exists():
        shutil.copy2(DEBIAN / "usr/lib/x86_64-linux-gnu/libseccomp.so.2", "/usr/lib/x86_64-linux-gnu/libseccomp.so.2")
        run("ldconfig")
    log_line(f"programs are in place, iptables is {variant}")


def _link(path: Path, target: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(target.name)


def _write_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def _make_network() -> None:
    """An address of the node's own, since such a machine may have none; and pods may send through it."""
    if not succeeds(BIN / "ip", "link", "show", "plimsoll0"):
        run(BIN / "ip", "link", "add", "plimsoll0", "type", "bridge")
        run(BIN / "ip", "address", "add", f"{NODE_IP}/24", "dev", "plimsoll0")
    run(BIN / "ip", "link", "set", "lo", "up")
    run(BIN / "ip", "link", "set", "plimsoll0", "up")
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")


def _make_kernel_ready() -> None:
    """What a booted system would have: control groups that may be divided, and the kernel's messages."""
    if not Path("/dev/kmsg").exists():
        run("mknod", "/dev/kmsg", "c", "1", "11")
    controllers, subtree = _CGROUPS / "cgroup.controllers", _CGROUPS / "cgroup.subtree_control"
    if not controllers.exists():
        return  # the first version, where nothing is to be done
    expected = " ".join(f"+{name}" for name in controllers.read_text().split())
    try:
        subtree.write_text(expected)
    except OSError:  # a group with processes of its own may not be divided: they move into one below it
        below = _CGROUPS / "machine"
        below.mkdir(exist_ok=True)
        for pid in (_CGROUPS / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):  # a kernel thread, or gone
                (below / "cgroup.procs").write_text(pid)
        subtree.write_text(expected)
    log_line(f"control groups: {expected}")


def _start_control_plane() -> None:
    _PKI.mkdir(parents=True, exist_ok=True)
    token = secrets.token_hex(16)
    run(BIN / "pki", _PKI, NODE_IP, API_SERVICE_IP, "127.0.0.1")
    (_PKI / "tokens.csv").write_text(f'{token},admin,1,"system:masters"\n')
    KUBECONFIG.write_text(config_files.kubeconfig(_PKI / "apiserver.crt", token))
    start("etcd", [BIN / "etcd", "--data-dir", ROOT / "etcd", "--unsafe-no-fsync", "--log-level", "warn"])
    start(
        "kube-apiserver",
        [
            BIN / "kube-apiserver",
            "--etcd-servers=http://127.0.0.1:2379",
            f"--advertise-address={NODE_IP}",
            f"--service-cluster-ip-range={SERVICE_NETWORK}",
            f"--tls-cert-file={_PKI}/apiserver.crt",
            f"--tls-private-key-file={_PKI}/apiserver.key",
            f"--token-auth-file={_PKI}/tokens.csv",
            "--authorization-mode=RBAC",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={_PKI}/accounts.key",
            f"--service-account-signing-key-file={_PKI}/accounts.key",
            f"--cert-dir={_PKI}",
            "--allow-privileged=true",
            "--kubelet-preferred-address-types=InternalIP",
        ],
    )
    wait_for(lambda: succeeds(BIN / "kubectl", "get", "--raw", "/readyz"), "the API server", _START_S)
    log_line("the API server answers")
    own = [f"--kubeconfig={KUBECONFIG}", "--leader-elect=false"]
    keys = [f"--root-ca-file={_PKI}/apiserver.crt", f"--service-account-private-key-file={_PKI}/accounts.key"]
    start("kube-controller-manager", [BIN / "kube-controller-manager", *own, *keys, f"--cert-dir={_PKI}"])
    start("kube-scheduler", [BIN / "kube-scheduler", *own, f"--cert-dir={_PKI}"])


def _start_node(fake_gpus: int) -> None:
    lenient = not sys_resource(Path("/proc/self/status").read_text())
    runc = DEBIAN / "usr/sbin/runc"
    if lenient:
        _write_program(
            BIN / "runc-lenient", config_files.lenient_runc((CLUSTER_FILES / "node/runc-lenient").read_text())
        )
        runc = BIN / "runc-lenient"
    files = {
        "containerd.toml": config_files.containerd(runc, sys_resource=not lenient),
        "cni/10-pod.conflist": config_files.pod_network(),
        "kubelet.json": config_files.kubelet(),
        "kube-proxy.json": config_files.kube_proxy(),
        "Corefile": config_files.corefile(),
        "resolv.conf": f"nameserver {NODE_IP}\n",
    }
    for name, text in files.items():
        (ROOT / name).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / name).write_text(text)
    start("containerd", [BIN / "containerd", "--config", ROOT / "containerd.toml"])
    wait_for(lambda: succeeds(*_ctr("version")), "containerd", _START_S)
    _import(_make_pause())
    start("kube-proxy", [BIN / "kube-proxy", f"--config={ROOT}/kube-proxy.json"])
    start("coredns", [BIN / "coredns", "-conf", ROOT / "Corefile"])
    flags = [f"--root-dir={ROOT}/kubelet", f"--node-ip={NODE_IP}", f"--hostname-override={NODE}"]
    start("kubelet", [BIN / "kubelet", f"--config={ROOT}/kubelet.json", f"--kubeconfig={KUBECONFIG}", *flags])
    plugin: list[str | Path] = [sys.executable, "-m", "e2e.gpu.device_plugin", DEVICE_PLUGINS, "--fake", str(fake_gpus)]
    plugin += [word for folder in engine_image.mounts() for word in ("--mount", folder)]
    start("device-plugin", plugin, {"PYTHONPATH": str(CHECKOUT), "PYTHONDONTWRITEBYTECODE": "1"})
    wait_for(lambda: _is_ready(get("node", NODE)), "the node", _START_S)
    log_line("the node is ready")


def _is_ready(thing: Any) -> bool:
    conditions = (thing or {}).get("status", {}).get("conditions", [])
    return any(c["type"] in ("Ready", "Available") and c["status"] == "True" for c in conditions)


def allocatable_gpus() -> int:
    """GPUs that the node advertises; 0 if it does not say."""
    node = get("node", NODE) or {}
    return int(node.get("status", {}).get("allocatable", {}).get("nvidia.com/gpu", 0))


def gpu_product() -> str:
    """The GPU type as the label of a node names it; of devices that do not exist, an H100's."""
    try:
        name = run("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").splitlines()[0]
    except StepFailed:
        return "NVIDIA-H100-80GB-HBM3"
    return name.strip().replace(" ", "-")


def _ctr(*words: str | Path) -> list[str | Path]:
    return [BIN / "ctr", "--address", f"{ROOT}/run/containerd.sock", "--namespace", "k8s.io", *words]


def _import(tar: Path) -> None:
    run(*_ctr("images", "import", tar), timeout_s=240)
    tar.unlink()
    log_line(f"image {tar.stem} is imported")


def _make_pause() -> Path:
    root, target = ROOT / "pause-root", ROOT / "pause.tar"
    root.mkdir(exist_ok=True)
    shutil.copy2(BIN / "pause", root / "pause")
    oci.write_image(root, {"Entrypoint": ["/pause"]}, image("pause"), target)
    return target


def _make_images() -> list[Path]:
    """Operator and Envoy: the files of their images, compiled again, since compiled Python was not carried."""
    await_unpacked("images", _UNPACK_S)
    root = IMAGES / "operator"
    code = root / "opt/plimsoll/app/plimsoll"  # the checkout's, which travels with each call
    shutil.rmtree(code, ignore_errors=True)
    shutil.copytree(CHECKOUT / "operator/plimsoll", code, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (code, *code.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    (root / "dev/shm").mkdir(exist_ok=True)  # for the semaphores of the processes that compile
    python = ("/usr/bin/python3", "-c", _COMPILE, "/usr/lib/python3.11", "/opt/plimsoll")
    run("chroot", root, *python, timeout_s=400)
    log_line("images are compiled")
    made = []
    for name in ("operator", "envoy"):
        config = oci.read_config(IMAGES / f"{name}.json")
        target = ROOT / f"{name}.tar"
        oci.write_image(IMAGES / name, config, image(name), target)
        made.append(target)
    return made


def _make_engine_image(model: str, simulated: str) -> list[Path]:
    await_unpacked("engine", _UNPACK_S)
    run(sys.executable, "-c", _COMPILE, ENGINE / "site", timeout_s=400)
    log_line("vLLM is compiled")
    return [engine_image.make(model, simulated)]


def _install_chart() -> None:
    text = (PARTS / "chart.yaml").read_text()
    for namespace in (SYSTEM, NAMESPACE):
        kubectl("apply", "-f", "-", stdin=f"{{apiVersion: v1, kind: Namespace, metadata: {{name: {namespace}}}}}")
    kubectl("apply", "--server-side", "-n", SYSTEM, "-f", "-", stdin=text)
    names = [f"deployment/{RELEASE}-operator", f"deployment/{RELEASE}-gateway"]
    wait_for(lambda: all(_is_ready(get(name, "-n", SYSTEM)) for name in names), "operator and gateway", 180)
    log_line("operator and gateway are available")
    wait_for(gateway_answers, "the gateway", 60)


def gateway_answers() -> bool:
    """Whether the gateway lists its models."""
    try:
        with _DIRECT.open(f"{GATEWAY_URL}/v1/models", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        time.sleep(0.3)
        return False
