# docker build -t hetero .
# docker run --rm hetero plan thunderserve-a5000-pair --model Llama-3-8B --slo ttft=2s,tpot=100ms
# docker run --rm -p 8888:8888 --entrypoint make hetero lab ARGS="--ip=0.0.0.0 --no-browser"
FROM python:3.11-slim-bookworm
RUN apt-get update \
    && apt-get install --yes --no-install-recommends git make \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home hetero
WORKDIR /home/hetero/project
COPY --chown=hetero:hetero . .
RUN chown hetero:hetero .
USER hetero
ENV PIP_NO_CACHE_DIR=1 UV_NO_CACHE=1 PATH=/home/hetero/project/.venv/bin:$PATH
RUN make setup
EXPOSE 8888
ENTRYPOINT ["hetero"]
CMD ["--help"]
