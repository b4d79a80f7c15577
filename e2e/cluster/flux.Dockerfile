# Flux's kustomize-controller, at /kustomize-controller.
ARG DEBIAN
FROM ${DEBIAN}
COPY programs/ /
USER 1000:1000
