# syntax=docker/dockerfile:1
# A CPU image by default. The base image brings Python 3.11 or later with venv; for GPUs name one with CUDA and give
# EXTRAS=[gpu].
#   docker build -t roll .  &&  docker run --rm --shm-size=1g roll
ARG BASE_IMAGE=python:3.11-slim-bookworm
FROM ${BASE_IMAGE}

ARG TORCH=torch==2.13.0
ARG EXTRAS=

ENV PATH=/opt/venv/bin:$PATH \
    PYTHONUNBUFFERED=1

RUN useradd --create-home --uid 10001 roll
WORKDIR /home/roll/roll

# The dependencies have a layer of their own, so that a change of the code does not install them again. A pip
# configuration (an index of your own, say) comes in as a secret and leaves no trace in the image:
#   docker build --secret id=pip.conf,src=$HOME/.config/pip/pip.conf ...
COPY setup.py pyproject.toml README.md LICENSE ./
COPY constraints constraints
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    python3 -m venv /opt/venv \
    && pip install --quiet --no-cache-dir ${TORCH} \
    && pip install --quiet --no-cache-dir -c constraints/cpu.txt ".${EXTRAS}" \
    && pip uninstall --quiet --yes roll-rl

COPY --chown=roll:roll . .
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    pip install --quiet --no-cache-dir --no-deps -e . \
    && chown roll:roll .

USER roll
CMD ["python", "examples/start_rlvr_pipeline.py"]
