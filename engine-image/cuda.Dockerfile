# The launcher on the official vLLM image. Context: this folder.
#   docker build --build-arg VLLM -f engine-image/cuda.Dockerfile -t plimsoll/engine-cuda engine-image
# release/base-images.env has the value of the build argument.
ARG VLLM

FROM ${VLLM} AS vllm
# Engines may not write where Python's packages lie: what is not compiled here each of their processes would compile.
COPY image/compile_packages.py /opt/plimsoll/build/
RUN python3 /opt/plimsoll/build/compile_packages.py
# The engine core takes over what the API server has imported; `vllm serve` would have it import everything again.
ENV VLLM_WORKER_MULTIPROC_METHOD=fork

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
