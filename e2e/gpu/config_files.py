"""The configuration files of the node's programs, as plain values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from e2e.gpu.settings import (
    BIN,
    DEBIAN,
    KUBECONFIG,
    NODE,
    NODE_IP,
    POD_NETWORK,
    ROOT,
    image,
)


def kubeconfig(certificate_chain: Path, token: str) -> str:
    """Access as administrator; JSON is YAML."""
    cluster = {"server": f"https://{NODE_IP}:6443", "certificate-authority": str(certificate_chain)}
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "node", "cluster": cluster}],
            "users": [{"name": "admin", "user": {"token": token}}],
            "contexts": [{"name": "node", "context": {"cluster": "node", "user": "admin"}}],
            "current-context": "node",
        },
        indent=1,
    )


def containerd(runc: Path, *, sys_resource: bool) -> str:
    """containerd's own TOML, version 3. Without CAP_SYS_RESOURCE no process may lower its OOM score."""
    cri = "io.containerd.cri.v1"
    lenient = "" if sys_resource else "  restrict_oom_score_adj = true\n"
    return f"""version = 3
root = "{ROOT}/containerd"
state = "{ROOT}/run/containerd"
[grpc]
  address = "{ROOT}/run/containerd.sock"
[plugins."{cri}.images"]
  snapshotter = "overlayfs"
  [plugins."{cri}.images".pinned_images]
    sandbox = "{image("pause")}"
[plugins."{cri}.runtime"]
{lenient}  [plugins."{cri}.runtime".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."{cri}.runtime".containerd.runtimes.runc.options]
      BinaryName = "{runc}"
      SystemdCgroup = false
  [plugins."{cri}.runtime".cni]
    bin_dirs = ["{DEBIAN}/usr/lib/cni"]
    conf_dir = "{ROOT}/cni"
"""


def pod_network() -> str:
    """One node needs no bridge: each pod has a link of its own, so that all traffic passes the rules of services."""
    addresses = {
        "type": "host-local",
        "dataDir": f"{ROOT}/run/cni",
        "routes": [{"dst": "0.0.0.0/0"}],
        "ranges": [[{"subnet": POD_NETWORK}]],
    }
    links = [
        {"type": "ptp", "ipMasq": True, "mtu": 1500, "ipam": addresses},
        {"type": "portmap", "capabilities": {"portMappings": True}},
    ]
    return json.dumps({"cniVersion": "0.4.0", "name": "pod", "plugins": links}, indent=1)


def kubelet() -> str:
    """Kubelet evicts nothing here: a full disk or a full memory must show as what it is."""
    document: dict[str, Any] = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": NODE_IP,
        "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
        "authorization": {"mode": "AlwaysAllow"},
        "cgroupDriver": "cgroupfs",
        "containerRuntimeEndpoint": f"unix://{ROOT}/run/containerd.sock",
        "clusterDNS": [NODE_IP],
        "clusterDomain": "cluster.local",
        "resolvConf": f"{ROOT}/resolv.conf",
        "failSwapOn": False,
        "failCgroupV1": False,
        "podLogsDir": f"{ROOT}/pods",
        "evictionHard": {"memory.available": "0%", "nodefs.available": "0%", "imagefs.available": "0%"},
        "imageGCHighThresholdPercent": 100,
        "enforceNodeAllocatable": [],
        "serializeImagePulls": False,
        "nodeStatusUpdateFrequency": "2s",
        "syncFrequency": "10s",  # until pods see a changed ConfigMap
    }
    return json.dumps(document, indent=1)


def kube_proxy() -> str:
    """Services by iptables; the limits of connection tracking stay the machine's."""
    document = {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "clientConnection": {"kubeconfig": str(KUBECONFIG)},
        "clusterCIDR": POD_NETWORK,
        "hostnameOverride": NODE,
        "mode": "iptables",
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
    }
    return json.dumps(document, indent=1)


def corefile() -> str:
    """Names of the cluster and no others."""
    return f""".:53 {{
  bind {NODE_IP}
  errors
  cache 5
  kubernetes cluster.local {{
    kubeconfig {KUBECONFIG}
  }}
  loadbalance
}}
"""


def network_tool(program: str, name: str) -> str:
    """A script that runs a Debian program with the libraries that were carried with it."""
    libraries = f"{DEBIAN}/usr/lib/x86_64-linux-gnu:{DEBIAN}/lib/x86_64-linux-gnu"
    return f"""#!/bin/sh
export LD_LIBRARY_PATH={libraries} XTABLES_LIBDIR={DEBIAN}/usr/lib/x86_64-linux-gnu/xtables
exec {DEBIAN}/{program} {name} "$@"
"""


def lenient_runc(script: str) -> str:
    """The wrapper of e2e/cluster for machines without CAP_SYS_RESOURCE, with this node's jq and runc."""
    return script.replace("jq ", f"{BIN}/jq ").replace("/usr/sbin/runc", f"{DEBIAN}/usr/sbin/runc")
