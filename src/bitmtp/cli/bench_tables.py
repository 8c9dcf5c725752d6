"""The tables of ``bitmtp bench``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bitmtp.cli.render import policy_label, print_table

if TYPE_CHECKING:
    from bitmtp.backends.cuda.profile import KernelTime
    from bitmtp.benchmark.policies import PolicyFigures
    from bitmtp.benchmark.profile import Profile
    from bitmtp.benchmark.widths import PassCosts


def print_costs(costs: PassCosts) -> None:
    """The cost of a pass by its width."""
    rows = [[str(cost.width), f"{cost.milliseconds:.2f}", f"{cost.ratio:.2f}"] for cost in costs.costs]
    print()
    print_table(
        f"One pass by width (history {costs.history}, exact head on every row)", ["width", "ms", "× width 1"], rows
    )
    if costs.bytes:
        print(_traffic(costs))
    print(
        f"autoregressive: {costs.implied_tokens_per_second:.1f} tok/s implied by width 1, "
        f"{costs.decoded_tokens_per_second:.1f} tok/s decoding"
    )


def _traffic(costs: PassCosts) -> str:
    """What a pass reads, how fast that is at width 1, and how fast it could be."""
    speed = costs.bytes / costs.costs[0].milliseconds * 1e3
    line = f"a pass reads {costs.bytes / 1e6:.1f} MB, at width 1 with {speed / 1e9:.1f} GB/s"
    if costs.memory_speed is None:
        return line
    limit, floor = costs.memory_speed, costs.bytes / costs.memory_speed * 1e3
    return f"{line}; at a copy's {limit / 1e9:.0f} GB/s it would take {floor:.3f} ms ({speed / limit:.0%})"


def print_profile(profile: Profile) -> None:
    """Kernels of passes, where the backend knows them, and the time to the first token."""
    for each in profile.passes:
        print()
        kind = "Draft" if each.masks else "Pass"
        print_table(
            f"{kind} of {each.width} rows, history {each.history}: {each.microseconds:.1f} us as a graph, "
            f"{each.total:.1f} us its kernels class by class",
            ["kernels", "launches", "us each", "us", "share", "MB", "GB/s"],
            [_kernel_row(kernel, each.total) for kernel in each.kernels],
        )
    if not profile.passes:
        print("\nThis backend runs a pass in one call: of its parts, only the head's time is known.")
    print()
    rows = [
        [
            str(each.prompt),
            f"{each.total:.2f}",
            f"{each.prefill:.2f}",
            f"{each.head:.3f}",
            "in the head" if each.sampling is None else f"{each.sampling:.3f}",
        ]
        for each in profile.first_token
    ]
    print_table("Time to the first token, ms", ["prompt", "total", "prefill", "head", "sampling"], rows)


def _kernel_row(kernel: KernelTime, total: float) -> list[str]:
    row = [kernel.name, str(kernel.launches), f"{kernel.microseconds / kernel.launches:.2f}"]
    row += [f"{kernel.microseconds:.1f}", f"{kernel.microseconds / total:.1%}"]
    if not kernel.bytes:
        return [*row, "-", "-"]
    return [*row, f"{kernel.bytes / 1e6:.1f}", f"{kernel.bytes / kernel.microseconds / 1e3:.0f}"]


def print_policies(figures: Sequence[PolicyFigures], title: str) -> None:
    """Policies against autoregressive decoding."""
    rows = [
        [
            policy_label(each.policy),
            f"{each.tokens_per_second:.1f}",
            f"{each.ratio:.2f}",
            f"{each.tokens_per_iteration:.2f}",
            f"{each.tokens_per_pass:.2f}",
            f"{each.draft_acceptance_rate:.0%}" if each.policy.block_size > 1 else "-",
            "yes" if each.policy.lossless else f"no ({len(each.mismatches)} texts differ)",
        ]
        for each in figures
    ]
    print()
    print_table(title, ["policy", "tok/s", "× AR", "tok/iter", "tok/pass", "accepted", "lossless"], rows)
