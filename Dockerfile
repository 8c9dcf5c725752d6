# The server on a CPU:            docker build -t bitmtp . && docker run -p 8000:8000 bitmtp
# with an NVIDIA card of the host: docker build -t bitmtp --build-arg EXTRAS=serve,cuda . && docker run --gpus all -p 8000:8000 bitmtp
ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS build
ARG EXTRAS=serve
RUN apt-get update && apt-get install -y --no-install-recommends g++ make
COPY . /source
RUN pip wheel --no-cache-dir --wheel-dir /wheels "/source[${EXTRAS}]"

FROM python:${PYTHON}-slim
ARG EXTRAS=serve
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir --no-index --find-links /wheels "bitmtp[${EXTRAS}]"
RUN useradd --create-home bitmtp
USER bitmtp
# The driver comes from the host; nothing of it is in the image.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
EXPOSE 8000
HEALTHCHECK --start-period=30s CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health')"]
ENTRYPOINT ["bitmtp"]
CMD ["serve", "--host", "0.0.0.0"]
