# KEDA's operator, at /keda-operator.
ARG DEBIAN
FROM ${DEBIAN}
COPY programs/ /
USER 1000:1000
