"""What ``bitmtp bench`` prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bitmtp.cli.render import print_facts, print_table

if TYPE_CHECKING:
    from bitmtp.backends.base import Backend
    from bitmtp.benchmark.environment import Environment
    from bitmtp.benchmark.policies import PolicyFigures
    from bitmtp.benchmark.widths import PassCosts

CHECKED = 8  # proposals that a typical pass verifies


def print_machine(name: str, where: Environment, backend: Backend) -> None:
    """What was measured, and on what."""
    runs = {key: value for key, value in backend.describe().items() if not key.endswith("bytes")}
    facts = [("CPU", f"{where.cpu}, {where.cores} cores ({where.isa})"), ("backend", backend.name), *runs.items()]
    print_facts(name, facts)


def print_costs(costs: PassCosts) -> None:
    """The cost of a pass by its width."""
    rows = [[str(cost.width), f"{cost.milliseconds:.2f}", f"{cost.ratio:.2f}"] for cost in costs.costs]
    print()
    print_table(f"One pass by width, behind {costs.history} tokens", ["width", "ms", "× width 1"], rows)
    if costs.bytes:
        print(_traffic(costs))


def _traffic(costs: PassCosts) -> str:
    """What a pass reads, how fast that is at width 1, and how fast it could be."""
    speed = costs.bytes / costs.costs[0].milliseconds * 1e3
    line = f"a pass reads {costs.bytes / 1e6:.1f} MB, at width 1 with {speed / 1e9:.1f} GB/s"
    if costs.memory_speed is None:
        return line
    limit, floor = costs.memory_speed, costs.bytes / costs.memory_speed * 1e3
    return f"{line}; at a copy's {limit / 1e9:.0f} GB/s it would take {floor:.3f} ms ({speed / limit:.0%})"


def print_policies(figures: Sequence[PolicyFigures], kind: str) -> None:
    """Policies against autoregressive decoding: the ratios are those of the rates beside them."""
    rows = [
        [
            _label(each),
            f"{each.tokens_per_second:.1f}",
            f"{each.ratio:.2f}",
            f"{each.tokens_per_pass:.2f}",
            f"{each.draft_acceptance_rate:.0%}" if each.policy.block_size > 1 else "-",
            f"{len(each.mismatches)} differ" if each.mismatches else "the same",
        ]
        for each in figures
    ]
    print()
    columns = ["policy", "tok/s", "× AR", "tok/pass", "accepted", "texts"]
    print_table(f"Policies against autoregressive decoding (AR)\n{kind}", columns, rows)


def _label(figures: PolicyFigures) -> str:
    policy = figures.policy
    label = f"{policy.name} D={policy.block_size}" if policy.block_size > 1 else policy.name
    return label if policy.lossless else f"{label}, lossy"


def takeaway(costs: PassCosts | None, figures: Sequence[PolicyFigures] | None) -> str:
    """What a person should take from it, in one line."""
    if figures is not None:
        return f"On this machine: {_best(figures)}"
    assert costs is not None
    ratio = next(cost.ratio for cost in costs.costs if cost.width == CHECKED)
    return (
        f"On this machine: {costs.decoded_tokens_per_second:.1f} tokens a second without drafts; "
        f"a pass that checks {CHECKED} tokens costs {ratio:.1f} × one"
    )


def _best(figures: Sequence[PolicyFigures]) -> str:
    """The fastest policy whose texts are autoregressive decoding's."""
    from bitmtp.benchmark.policies import WORTH

    slowest, *others = [each for each in figures if each.policy.lossless and not each.broken]
    best = max(others, key=lambda each: each.ratio, default=slowest)
    if best.ratio < WORTH:
        return f"`autoregressive`, {slowest.tokens_per_second:.0f} tokens a second; drafting gains nothing"
    several = [each for each in others if each.policy.name == best.policy.name]
    size = f" with blocks of {best.policy.block_size}" if len(several) > 1 else ""
    return (
        f"`{best.policy.name}`{size}, {best.ratio:.2f} × autoregressive decoding "
        f"({best.tokens_per_second:.0f} against {slowest.tokens_per_second:.0f} tokens a second), the same texts"
    )
