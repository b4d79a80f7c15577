# A simulated engine with the launcher: vLLM's HTTP, metrics and scheduling at a measured accelerator's pace, in 40 MB of
# memory. Context: the root of the checkout, since the engine and the profiles of accelerators are the simulator's. Works
# with the legacy builder.
#   docker build --build-arg DEBIAN -f engine-image/simulated.Dockerfile -t plimsoll/engine-simulated .
# release/base-images.env has the value of the build argument.
ARG DEBIAN

FROM ${DEBIAN} AS build
RUN apt-get update -qq \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
      ca-certificates python3 python3-venv > /dev/null \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /usr/share/doc
# pip reads these from its environment.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
ARG PIP_TRUSTED_HOST
ARG PIP_CERT
ARG PIP_DEFAULT_TIMEOUT
COPY engine-image/simulated.lock /build/
RUN python3 -m venv /opt/simulated \
 && /opt/simulated/bin/pip install --quiet --no-cache-dir --no-deps --only-binary :all: --require-hashes \
      -r /build/simulated.lock \
 && /opt/simulated/bin/pip uninstall --quiet --yes pip setuptools

FROM ${DEBIAN} AS simulated
RUN apt-get update -qq \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends python3 > /dev/null \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /usr/share/doc
COPY --from=build /opt/simulated /opt/simulated
ENV PATH=/opt/simulated/bin:$PATH \
    PLIMSOLL_RUNTIME=simulated
COPY operator/plimsoll/__init__.py /opt/plimsoll/plimsoll/
COPY operator/plimsoll/engines /opt/plimsoll/plimsoll/engines
COPY operator/plimsoll/sim/__init__.py operator/plimsoll/sim/profiles.py /opt/plimsoll/plimsoll/sim/
COPY operator/plimsoll/sim/profiles /opt/plimsoll/plimsoll/sim/profiles
COPY operator/plimsoll/sim/engine /opt/plimsoll/plimsoll/sim/engine
COPY engine-image/simulated /opt/plimsoll/simulated
# The root file system is read-only where this runs: compile now, not at every start.
RUN python3 -m compileall -q --invalidation-mode unchecked-hash /opt/plimsoll

FROM simulated
# The launcher: these lines are the same in cpu.Dockerfile and cuda.Dockerfile.
RUN { getent passwd 1000 > /dev/null || echo 'plimsoll:x:1000:1000::/home/plimsoll:/usr/sbin/nologin' >> /etc/passwd; } \
 && mkdir -p /home/plimsoll /models && chown 1000:1000 /home/plimsoll
ENV HOME=/home/plimsoll PYTHONPATH=/opt/plimsoll PYTHONUNBUFFERED=1 VLLM_NO_USAGE_STATS=1
WORKDIR /home/plimsoll
EXPOSE 8000 8001 5600
ENTRYPOINT ["sh", "/opt/plimsoll/launcher/start.sh"]
CMD []
COPY engine-image/contract.json /opt/plimsoll/
COPY engine-image/launcher /opt/plimsoll/launcher
RUN chmod -R a+rX /opt/plimsoll
USER 1000:1000
