# vLLM on CPU with the launcher: for laptops, tests and the demo. Context: this folder. Works with the legacy builder.
#   docker build --build-arg DEBIAN -f engine-image/cpu.Dockerfile -t plimsoll/engine-cpu engine-image
# vLLM alone, a base for cuda.Dockerfile:
#   docker build --build-arg DEBIAN -f engine-image/cpu.Dockerfile --target vllm -t plimsoll/vllm-cpu engine-image
# release/base-images.env has the value of the build argument.
ARG DEBIAN

FROM ${DEBIAN} AS build
RUN apt-get update -qq \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
      binutils ca-certificates libgomp1 libnuma1 python3 python3-venv > /dev/null \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /usr/share/doc
# pip reads these from its environment.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
ARG PIP_TRUSTED_HOST
ARG PIP_CERT
ARG PIP_DEFAULT_TIMEOUT
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY cpu.lock torch.lock torch-cuda.lock image/install_vllm.sh image/slim_torch.py image/cut_section.py /build/
RUN /build/install_vllm.sh /opt/vllm /build
COPY image/make_tiny_model.py /build/
RUN /opt/vllm/bin/python /build/make_tiny_model.py /models/tiny

FROM ${DEBIAN} AS vllm
RUN apt-get update -qq \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
      ca-certificates libgomp1 libnuma1 python3 > /dev/null \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /usr/share/doc
COPY --from=build /opt/vllm /opt/vllm
COPY --from=build /models /models
# Pods share a node's cores: no binding to core 0, no second worker process, no second import of everything.
# There is no compiler for torch to use.
ENV PATH=/opt/vllm/bin:$PATH \
    VLLM_CPU_OMP_THREADS_BIND=nobind \
    VLLM_ENABLE_V1_MULTIPROCESSING=0 \
    VLLM_WORKER_MULTIPROC_METHOD=fork \
    TORCHDYNAMO_DISABLE=1

FROM vllm
# The launcher: these lines are the same in cpu.Dockerfile and cuda.Dockerfile.
RUN { getent passwd 1000 > /dev/null || echo 'plimsoll:x:1000:1000::/home/plimsoll:/usr/sbin/nologin' >> /etc/passwd; } \
 && mkdir -p /home/plimsoll /models && chown 1000:1000 /home/plimsoll
ENV HOME=/home/plimsoll PYTHONPATH=/opt/plimsoll PYTHONUNBUFFERED=1 VLLM_NO_USAGE_STATS=1
WORKDIR /home/plimsoll
EXPOSE 8000 8001 5600
ENTRYPOINT ["sh", "/opt/plimsoll/launcher/start.sh"]
CMD []
COPY contract.json /opt/plimsoll/
COPY launcher /opt/plimsoll/launcher
RUN chmod -R a+rX /opt/plimsoll
USER 1000:1000
