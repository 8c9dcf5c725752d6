"""The CUDA backend's figures in one run: passes by width and history, and prefill.

    python benchmarks/gpu.py [--shapes bonsai-1.7b bitnet-2b] [--long 32768 131072]

Passes are replays of their graphs between two events, medians; random ternary weights of the true shapes, exact head on
every row, attention and choice included. The floor is what a pass must read, at the speed of a large copy in this run.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from statistics import median

import numpy as np

from bitmtp.backends.cuda.backend import CudaBackend
from bitmtp.backends.cuda.device import Gpu
from bitmtp.backends.cuda.profile import copy_speed, history_bytes, prepared_pass
from bitmtp.benchmark.shapes import SHAPES, random_checkpoint

CONTEXT = 512
ROUNDS, REPLAYS = 9, 20


def pass_seconds(backend: CudaBackend, width: int, history: int, masks: bool = False) -> float:
    """Median time of a pass over ``width`` rows behind ``history`` positions (whatever K/V lie there)."""
    with prepared_pass(backend, width, history, masks) as shape:
        return median(backend.gpu.seconds(lambda: backend.atlas.launch(shape), REPLAYS) for _ in range(ROUNDS))


def report_shape(name: str, widths: list[int], speed: float) -> None:
    """Passes by width, prefill, and what the host adds."""
    config = SHAPES[name]
    began = time.perf_counter()
    backend = CudaBackend(random_checkpoint(config, name), context=4096)
    print(f"\n{name}: loaded in {time.perf_counter() - began:.1f} s; {backend.describe()}")
    for width in widths:
        taken = pass_seconds(backend, width, CONTEXT)
        floor = (backend.network.weight_bytes + history_bytes(backend, CONTEXT)) / speed
        print(
            f"  width {width:2}: {taken * 1e6:7.1f} us a pass, floor {floor * 1e6:6.1f} us ({floor / taken:4.0%})"
            + (f", {1 / taken:6.0f} tok/s" if width == 1 else "")
        )
    sequence = backend.open()
    prompt = np.random.default_rng(0).integers(5, 1000, 2048).tolist()
    taken = []
    for _ in range(4):
        backend.truncate(sequence, 0)
        began = time.perf_counter()
        backend.prefill(sequence, prompt)
        taken.append(time.perf_counter() - began)
    print(f"  prefill of 2,048 tokens: {2048 / median(taken[1:]):,.0f} tok/s")
    backend.close(sequence)


def report_long(name: str, histories: list[int], speed: float) -> None:
    """Width 1 and 8 behind long histories, against the bytes that they read."""
    longest = max(histories) + 64
    config = replace(SHAPES[name], max_position=longest)
    backend = CudaBackend(random_checkpoint(config, name), context=longest)
    print(f"\n{name}, long histories")
    base = pass_seconds(backend, 1, CONTEXT)
    for history in histories:
        one, eight = (pass_seconds(backend, width, history) for width in (1, 8))
        added = (history_bytes(backend, history) - history_bytes(backend, CONTEXT)) / speed
        print(
            f"  {history:7}: width 1 {one * 1e6:8.1f} us, width 8 {eight * 1e6:8.1f} us ({eight / one:.2f} x); "
            f"K/V beyond {CONTEXT} cost {(one - base) * 1e6:.0f} us, their bytes {added * 1e6:.0f} us "
            f"({added / (one - base):.0%})"
        )


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", nargs="*", default=["smollm2-135m", "bonsai-1.7b", "bitnet-2b", "bonsai-4b"])
    parser.add_argument("--widths", nargs="*", type=int, default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--long", nargs="*", type=int, default=[32_768, 131_072])
    parser.add_argument("--long-shape", default="bonsai-1.7b")
    return parser.parse_args()


def main() -> None:
    """Everything, one after the other."""
    options = parse()
    gpu = Gpu()
    speed = copy_speed(gpu)
    print(f"{gpu.device.name}, {gpu.architecture}, copies at {speed / 1e12:.2f} TB/s")
    for name in options.shapes:
        report_shape(name, options.widths, speed)
    if options.long:
        report_long(options.long_shape, options.long, speed)


if __name__ == "__main__":
    main()
