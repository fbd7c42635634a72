# syntax=docker/dockerfile:1
# For CPUs:   docker build -t roll .  &&  docker run --rm --shm-size=1g roll
# For GPUs:   docker build --build-arg DEVICE=cuda -t roll-cuda .
# The base image brings Python 3.11 or later with venv; one with CUDA's compiler is needed only to build further kernels.
ARG BASE_IMAGE=python:3.11-slim-bookworm

FROM ${BASE_IMAGE} AS packages
ARG DEVICE=cpu
ARG TORCH=torch==2.13.0
ARG EXTRAS=
WORKDIR /build
# The dependencies have a stage of their own, so that a change of the code does not install them again. A pip
# configuration (an index of your own, say) comes in as a secret and leaves no trace in the image:
#   docker build --secret id=pip.conf,src=$HOME/.config/pip/pip.conf ...
COPY setup.py pyproject.toml README.md LICENSE ./
COPY constraints constraints
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    case "${DEVICE}" in \
        cpu) extras="${EXTRAS}" ;; \
        cuda) extras="${EXTRAS:-[gpu]}" ;; \
        *) echo "DEVICE=${DEVICE}: must be cpu or cuda" >&2; exit 2 ;; \
    esac \
    && python3 -m venv /opt/venv \
    && /opt/venv/bin/pip install --quiet --no-cache-dir ${TORCH} \
    && /opt/venv/bin/pip install --quiet --no-cache-dir -c constraints/cpu.txt ".${extras}" \
    && /opt/venv/bin/pip uninstall --quiet --yes roll-rl

FROM ${BASE_IMAGE}
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONUNBUFFERED=1
RUN useradd --create-home --uid 10001 roll
WORKDIR /home/roll/roll
COPY --from=packages /opt/venv /opt/venv
COPY --chown=roll:roll . .
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    pip install --quiet --no-cache-dir --no-deps -e . \
    && mkdir -p output examples/tiny/artifacts \
    && chown roll:roll . output examples/tiny/artifacts
USER roll
CMD ["python", "examples/start_rlvr_pipeline.py"]
