# The image of all pods of a run: Ray head, workers, dataset Job. Build: docker build --build-arg DEVICE=gpu -t REGISTRY/rayapp:VERSION .
# Everything is installed at build time; a pod installs nothing when it starts. For a reproducible image give the base by
# digest: --build-arg PYTHON_IMAGE=python@sha256:...
ARG PYTHON_IMAGE=python:3.12-slim-bookworm
FROM ${PYTHON_IMAGE} AS build
ARG DEVICE=gpu
# Folder with wheels, for DEVICE=cpu where PyTorch's own index can't be reached: PyPI has no CPU build of torch.
ARG PIP_FIND_LINKS
WORKDIR /opt/rayapp
COPY runtime_env runtime_env
COPY pyproject.toml ./
RUN python runtime_env/install.py --device "${DEVICE}" --bytecode now --lock-only \
    && .venv/bin/pip uninstall --yes --quiet uv

FROM ${PYTHON_IMAGE}
# skopeo, umoci: sandboxes on images. libibverbs1, librdmacm1, ibverbs-providers: RDMA for NCCL between nodes; without them it silently falls back to TCP.
# libnuma1: vLLM for CPUs. gcc: vLLM compiles kernels when it starts. g++: so does torch.compile (learner.compile). wget: KubeRay's probes call it. procps: Ray's dashboard calls ps.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        g++ gcc ibverbs-providers libc6-dev libibverbs1 libnuma1 librdmacm1 procps skopeo umoci wget \
    && rm -rf /var/lib/apt/lists/*
# The code belongs to root: a run can't change it. Only these two folders, for trials, are the user's.
RUN useradd --uid 10001 --create-home rayapp \
    && install --directory --owner 10001 --group 10001 /opt/rayapp/models /opt/rayapp/outputs
WORKDIR /opt/rayapp
# The packages are a layer of their own, which stays the same while only the code changes.
COPY --from=build /opt/rayapp/.venv .venv
COPY pyproject.toml README.md LICENSE ./
COPY configs configs
COPY actors actors
COPY rayapp rayapp
RUN .venv/bin/pip install --no-cache-dir --no-deps --no-build-isolation -e . \
    && .venv/bin/python -m compileall -q rayapp actors
ENV PATH=/opt/rayapp/.venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    RAY_USAGE_STATS_ENABLED=0 \
    HF_HOME=/tmp/huggingface
USER 10001
ENTRYPOINT []
CMD ["python", "-m", "rayapp", "--help"]
