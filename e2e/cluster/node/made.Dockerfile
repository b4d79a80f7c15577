# A kind node from parts: kind's own scripts and units (files/), our binaries, the control plane's images already in containerd.
ARG PACKAGES
FROM ${PACKAGES}
ARG RUNC
ARG PAUSE
COPY files/usr/local/bin/ runc-lenient /usr/local/bin/
COPY files/kind/ /kind/
COPY files/etc/ /etc/
COPY bin/ /usr/local/bin/
COPY images.tar /kind/images.tar
RUN chmod 755 /usr/local/bin/* /kind/bin/* \
 && ln -sf /usr/local/bin/kubelet /usr/local/bin/kubeadm /usr/local/bin/kubectl /usr/bin/ \
 && mkdir -p /opt/cni/bin /etc/kubernetes/manifests && cp /usr/lib/cni/* /opt/cni/bin/ \
 && find /lib/systemd/system/sysinit.target.wants/ -name systemd-tmpfiles-setup.service -delete \
 && rm -f /lib/systemd/system/multi-user.target.wants/* /etc/systemd/system/*.wants/* /lib/systemd/system/local-fs.target.wants/* \
      /lib/systemd/system/sockets.target.wants/*udev* /lib/systemd/system/sockets.target.wants/*initctl* \
 && echo "ReadKMsg=no" >> /etc/systemd/journald.conf && ln -sf /usr/lib/systemd/systemd /sbin/init \
 && systemctl enable kubelet.service containerd.service undo-mount-hacks.service && systemctl mask systemd-binfmt.service
RUN sed -i "s#restrict_oom_score_adj = false#restrict_oom_score_adj = true#; s#sandbox_image = .*#sandbox_image = \"$PAUSE\"#; \
      s#SystemdCgroup = true#SystemdCgroup = true\n    BinaryName = \"$RUNC\"#" /etc/containerd/config.toml \
 && ctr oci spec | jq '.hooks.createContainer[.hooks.createContainer|length] |= . + {"path": "/kind/bin/mount-product-files.sh"} | del(.process.rlimits)' \
      > /etc/containerd/cri-base.json \
 && cp /kind/k8s-version /kind/version \
 && (containerd >/dev/null 2>&1 & pid=$!; until ctr version >/dev/null 2>&1; do sleep .2; done; \
     ctr -n k8s.io images import --no-unpack --digests /kind/images.tar >/dev/null && kill $pid && wait $pid || true) \
 && rm /kind/images.tar && test -n "$(ls /var/lib/containerd/io.containerd.content.v1.content/blobs/sha256)"
ENV container=docker
STOPSIGNAL SIGRTMIN+3
ENTRYPOINT ["/usr/local/bin/entrypoint", "/sbin/init"]
