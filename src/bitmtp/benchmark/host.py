"""What the host adds to an iteration of speculative decoding on the GPU, by how much of the runtime takes part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from bitmtp.backends.cuda.backend import CudaBackend
from bitmtp.backends.cuda.profile import prepared_pass
from bitmtp.backends.cuda.runtime import Runtime
from bitmtp.benchmark.timed import timed_text
from bitmtp.decoding.policies import make_policy
from bitmtp.sampling import Sampling

_REPLAYS, _ROUNDS = 20, 5


@dataclass(frozen=True, slots=True)
class HostCost:
    """An iteration (a draft pass and a verify pass) in microseconds.

    Attributes:
        iteration: as the host sees it.
        passes: of its two graphs, replayed between events behind the same history.
    """

    runtime: Runtime
    iteration: float
    passes: float

    @property
    def added(self) -> float:
        """What is not the passes: decisions, wherever they are made, and what waits for them."""
        return self.iteration - self.passes


def host_costs(backend: CudaBackend, prompt: Sequence[int], tokens: int, block_size: int = 8) -> list[HostCost]:
    """Write a text, every proposal of every draft verified, on each rung that has graphs.

    Args:
        prompt: with ``tokens`` it should stay within one capacity class.
    """
    history = len(prompt) + tokens // 2
    passes = sum(_pass_seconds(backend, block_size, history, masks) for masks in (True, False))
    whole, costs = backend.runtime, []
    for runtime in (Runtime.GRAPHS, Runtime.ITERATION, Runtime.RESIDENT):
        backend.runtime = runtime
        taken = [_iteration_seconds(backend, prompt, tokens, block_size) for _ in range(_ROUNDS)]
        costs.append(HostCost(runtime, median(taken) * 1e6, passes * 1e6))
    backend.runtime = whole
    return costs


def _pass_seconds(backend: CudaBackend, width: int, history: int, masks: bool) -> float:
    with prepared_pass(backend, width, history, masks) as shape:
        return median(backend.gpu.seconds(lambda: backend.atlas.launch(shape), _REPLAYS) for _ in range(_ROUNDS))


def _iteration_seconds(backend: CudaBackend, prompt: Sequence[int], tokens: int, block_size: int) -> float:
    policy = make_policy("speculative", block_size, block_size=block_size, verify_bound=0.0)
    taken, stats = timed_text(backend, policy, prompt, tokens, Sampling())
    return taken / stats.iterations
