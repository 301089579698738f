# The server image: vLLM 0.30.0 with the patch series, and the kit beside it in an environment of its own.
#
#   ./flashnext image build                                    on vllm/vllm-openai:v0.30.0
#   docker build --build-arg BASE_IMAGE=flashnext-cpu-base:0.30.0 -t flashnext-demo:0.1.0 .     the CPU demo
#
# Stages: kit (our command line), patched (the series in the base's own tree), verify (nothing is shipped that it does not
# pass), runtime.
ARG BASE_IMAGE=vllm/vllm-openai:v0.30.0

# hadolint ignore=DL3006
FROM ${BASE_IMAGE} AS base
# The bases run as root; only the build does.
# hadolint ignore=DL3002
USER 0:0

FROM base AS kit
WORKDIR /src
COPY build/locks/kit.txt ./kit.txt
# An environment of its own: what vLLM pins and what we pin never meet. A base may lack ensurepip and have uv instead.
# pip.conf and uv.toml of a private index come as secrets: build arguments stay readable in an image's history.
RUN --mount=type=secret,id=pip,target=/etc/pip.conf,required=false \
    --mount=type=secret,id=uv,target=/etc/uv/uv.toml,required=false \
    --mount=type=cache,target=/var/cache/kit \
    python3 -m venv --without-pip /opt/flashnext && \
    if python3 -m venv /opt/pip 2>/dev/null; then \
      PIP_CACHE_DIR=/var/cache/kit/pip /opt/pip/bin/pip --python /opt/flashnext/bin/python install --quiet --require-hashes -r kit.txt; \
    else \
      UV_CACHE_DIR=/var/cache/kit/uv uv pip install --quiet --python /opt/flashnext/bin/python --require-hashes -r kit.txt; \
    fi
COPY pyproject.toml LICENSE NOTICE README.md ./
COPY entrypoint entrypoint
COPY healthcheck healthcheck
COPY build build
RUN --mount=type=secret,id=pip,target=/etc/pip.conf,required=false \
    --mount=type=secret,id=uv,target=/etc/uv/uv.toml,required=false \
    --mount=type=cache,target=/var/cache/kit \
    if [ -x /opt/pip/bin/pip ]; then \
      PIP_CACHE_DIR=/var/cache/kit/pip /opt/pip/bin/pip --python /opt/flashnext/bin/python install --quiet --no-deps .; \
    else \
      UV_CACHE_DIR=/var/cache/kit/uv uv pip install --quiet --python /opt/flashnext/bin/python --no-deps .; \
    fi && \
    /opt/flashnext/bin/python -m compileall -q /opt/flashnext/lib

FROM base AS patched
COPY patches /opt/flashnext/patches
# The tree is where this base's own Python finds vllm, whatever the base.
RUN tree="$(python3 -c 'import importlib.util as u; print(u.find_spec("vllm").submodule_search_locations[0].rsplit("/", 1)[0])')" && \
    python3 /opt/flashnext/patches/apply.py "${tree}" && \
    printf '%s' "${tree}" > /opt/flashnext/patches/tree

FROM patched AS verify
RUN tree="$(cat /opt/flashnext/patches/tree)" && \
    python3 /opt/flashnext/patches/apply.py "${tree}" --check --json > /verified.json && cat /verified.json && \
    python3 -m compileall -q "${tree}/flashnext" && \
    python3 /opt/flashnext/patches/imports.py
COPY --from=kit /opt/flashnext /opt/flashnext
RUN FLASHNEXT_MODEL=/nowhere /opt/flashnext/bin/flashnext plan --simulate 3x3090 --ram 125GiB --json --model /dev/null >/dev/null 2>&1; \
    test "$?" -eq 4 && \
    /opt/flashnext/bin/flashnext plan --simulate 3x3090 --ram 125GiB --json >/dev/null

FROM patched AS runtime
ARG BASE_IMAGE
ARG VERSION=0.1.0
ARG REVISION=unknown
ARG CREATED=1970-01-01T00:00:00Z
COPY --from=kit /opt/flashnext /opt/flashnext
COPY --from=verify /verified.json /opt/flashnext/verified.json
COPY LICENSE NOTICE /opt/flashnext/
# A named volume takes owner and mode from the image's folder when it is first mounted.
RUN groupadd --gid 10001 flashnext && \
    useradd --uid 10001 --gid 10001 --home-dir /var/lib/flashnext --no-create-home --shell /usr/sbin/nologin flashnext && \
    install -d -o 10001 -g 10001 -m 0755 /var/lib/flashnext /run/flashnext
ENV HOME=/var/lib/flashnext \
    PATH=/opt/flashnext/bin:${PATH} \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    FLASHNEXT_STATE_DIR=/run/flashnext
LABEL org.opencontainers.image.title="flashnext" \
      org.opencontainers.image.description="Qwen3.8-Flash-Next on a box of 24 GB cards: patched vLLM 0.30.0 with its plan and its health" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.base.name="${BASE_IMAGE}"
USER 10001:10001
WORKDIR /var/lib/flashnext
EXPOSE 8000
STOPSIGNAL SIGTERM
# A first boot reads 62 GiB of weights and compiles; the first healthy answer ends the start period.
HEALTHCHECK --interval=60s --timeout=30s --start-period=60m --start-interval=5s --retries=3 \
  CMD ["/opt/flashnext/bin/flashnext-health"]
ENTRYPOINT ["/opt/flashnext/bin/flashnext"]
CMD ["serve"]
