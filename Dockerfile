# flowgrpo on a GPU. The wheels of torch bring CUDA 13; the host needs NVIDIA's driver 580 or later and its container toolkit.
#
#   docker build --build-arg UID=$(id -u) -t flowgrpo .
#   docker run --rm --gpus all --ipc=host -v "$PWD":/workspace -v ~/.cache/huggingface:/home/flowgrpo/.cache/huggingface \
#       flowgrpo train sd35.yaml
FROM python:3.11-slim

# model.compile: Triton calls a C compiler at run time.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

# What it writes into mounted folders belongs to this user.
ARG UID=1000
RUN useradd --create-home --uid ${UID} flowgrpo \
    && mkdir -p /workspace /home/flowgrpo/.cache/huggingface \
    && chown -R flowgrpo /workspace /home/flowgrpo/.cache

WORKDIR /src
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY flowgrpo flowgrpo
COPY rewards rewards
COPY samplers samplers
RUN pip install --no-cache-dir -c constraints.txt '.[hub,ocr,parquet,serve,video]'

USER flowgrpo
WORKDIR /workspace
ENTRYPOINT ["flowgrpo"]
CMD ["--help"]
