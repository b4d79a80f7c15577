# Programs of other projects, at /NAME.
ARG DEBIAN
FROM ${DEBIAN}
COPY programs/ /
USER 1000:1000
