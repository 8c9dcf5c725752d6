"""The head of 16-bit floats: its kernel for a number of rows. Heads of integers are products like any other."""

from __future__ import annotations

from bitmtp.backends.base import Head
from bitmtp.backends.cuda.device import Gpu, Kernel
from bitmtp.backends.cuda.matrices import Matrix, round_up

_THREADS = 256
_ROWS = 8  # of the pass, that a block takes at most
_SHARED_BYTES = 96 << 10  # for them; what the smallest cards have


def float_head(gpu: Gpu, matrix: Matrix, width: int, out_stride: int, head: Head = Head.NONE) -> Kernel:
    """The kernel for passes of up to ``width`` rows, whose input rows are padded to multiples of 16 floats.

    Arguments of a launch: pass, weights, x, stats, gain, logits, float32 eps.

    Args:
        out_stride: floats of a row of logits.
        head: the rows it is for; NONE: all that have one.
    """
    stride, row_bytes, rows = round_up(matrix.inputs, 16), round_up(matrix.inputs, 128) * 4, min(width, _ROWS)
    while rows > 1 and rows * row_bytes > _SHARED_BYTES:
        rows //= 2
    constants = {
        "INPUTS": matrix.inputs, "X_STRIDE": stride, "PARTS": stride // 16, "VOCAB": matrix.outputs,
        "OUT_STRIDE": out_stride, "ROWS": rows, "HEAD": int(head),
    }  # fmt: skip
    grid = (2 * gpu.multiprocessors, -(-width // rows))
    return gpu.kernel(
        "float_head.cu", "float_head", constants, grid=grid, block=_THREADS, shared_bytes=rows * row_bytes
    )
