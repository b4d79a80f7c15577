"""A real Kubernetes cluster on this machine, by kind, whether or not images can be pulled.

Problem: the demo and the cluster scenarios need kubelet, API server and containerd, on machines that range from a
laptop with Docker and internet to a bare one that reaches package registries only. Idea: look at the machine
(`facts`), decide once (`decide`, pure), say what will be done, do it. Where the node image can be pulled it is;
otherwise it is made from Kubernetes' own Go modules and Debian packages. Everything after that point is one road.

    check     only the preconditions, each missing one a line
    up        machine -> binaries -> node image -> cluster -> registry -> GPUs on the node; what is there is kept
    images    project images, pushed to the local registry when they changed
    cuda-lines  the GPU engine's Dockerfile, built on the CPU engine's base
    binaries  just the named programs (the API tests need only kube-apiserver and etcd)
    gpus      the node advertises GPUs
    down      cluster and registry go, caches stay
"""
