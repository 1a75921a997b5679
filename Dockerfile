# An image with Shardwise, for GPUs by default; nothing is compiled.
#
#     docker build -t shardwise .                          # torch's CUDA build
#     docker build -t shardwise:cpu --build-arg DEVICE=cpu .
#     docker run --rm --gpus all --ipc host shardwise      # what the container has, and whether it can train
#     docker run --rm --gpus all --ipc host -v "$PWD:/work" shardwise shardwise train my.toml
#
# CUDA's libraries come with torch's wheels, so a plain Python image is enough; the host has the driver.
FROM python:3.12-slim

ARG DEVICE=gpu
ARG TORCH=2.13.0
ARG EXTRAS=hf,tensorboard

# inductor and Triton build their launchers with a C compiler when they run.
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*

RUN case "$DEVICE" in \
      cpu) pip install --no-cache-dir "torch==$TORCH" --index-url https://download.pytorch.org/whl/cpu ;; \
      gpu) pip install --no-cache-dir "torch==$TORCH" ;; \
      *) echo "DEVICE=$DEVICE is neither cpu nor gpu" >&2; exit 1 ;; \
    esac

COPY pyproject.toml requirements.lock README.md LICENSE /src/
COPY src /src/src
# The versions that are tested, but for torch, which is installed already.
RUN grep -v '^torch==' /src/requirements.lock > /src/constraints.txt \
    && pip install --no-cache-dir "/src[$EXTRAS]" -c /src/constraints.txt

WORKDIR /work
CMD ["shardwise", "doctor"]
