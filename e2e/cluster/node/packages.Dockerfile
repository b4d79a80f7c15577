# Debian's share of a node: systemd, runc, the network plugins. (bookworm: its systemd still takes cgroup v1.)
FROM debian:bookworm-slim
RUN apt-get update -qq \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
      systemd dbus conntrack iptables nftables iproute2 ethtool util-linux mount kmod libseccomp2 pigz \
      fuse-overlayfs e2fsprogs bash curl jq procps runc containernetworking-plugins >/dev/null \
 && rm -rf /var/lib/apt/lists/*
