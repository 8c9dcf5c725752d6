"""Tokens an iteration along a text, beside its entropy: a drawing of what the adaptive policy did.

python benchmarks/along.py --output docs/along.svg
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

from bitmtp.benchmark.prompts import BUILT_IN, encode_prompts
from bitmtp.decoding.decoder import advance
from bitmtp.decoding.policies import make_policy
from bitmtp.engine import Engine, Request
from bitmtp.errors import BitMTPError

WIDTH, HEIGHT, LEFT, TOP = 760, 120, 40, 26
MOST_TOKENS, MOST_NATS = 12, 4.0
STYLE = (
    "<style>text{font:12px sans-serif;fill:#555}.tokens{fill:#3b7dd8;fill-opacity:.6}"
    ".nats{fill:none;stroke:#c2410c;stroke-width:1.5}line{stroke:#999}"
    "@media(prefers-color-scheme:dark){text{fill:#bbb}.nats{stroke:#fb923c}}</style>"
)


@dataclass(frozen=True)
class Iteration:
    """Where it began, what it committed, and the mean entropy (nats) of the rows that chose it."""

    start: int
    tokens: int
    entropy: float


def write(engine: Engine, prompt: list[int], max_tokens: int) -> list[Iteration]:
    """The iterations of one greedy text."""
    found: list[Iteration] = []
    with engine.session() as session:
        generation = session.generate(Request(prompt, max_tokens, make_policy("auto", engine.config.block_size)))
        start = len(generation.start())
        while generation.decoder.finish is None:
            advance(engine.backend, [generation.decoder])
            if chunks := generation.take():
                nats = [chunk.token.output.entropy for chunk in chunks if chunk.token.output is not None]
                found.append(Iteration(start, len(chunks), sum(nats) / len(nats)))
                start += len(chunks)
    return found


def panel(title: str, iterations: list[Iteration], top: int, length: int) -> list[str]:
    """Bars as wide as an iteration and as high as its tokens; a line for its entropy."""
    base, scale = top + HEIGHT, WIDTH / length
    parts = [f'<text x="{LEFT}" y="{top - 8}">{title}</text>']
    parts.append(f'<line x1="{LEFT}" y1="{base}" x2="{LEFT + WIDTH}" y2="{base}"/>')
    parts.append(f'<text x="{LEFT - 6}" y="{top + 10}" text-anchor="end">{MOST_TOKENS}</text>')
    parts.append(f'<text x="{LEFT + WIDTH + 6}" y="{top + 10}">{MOST_NATS:g} nats</text>')
    points = []
    for each in iterations:
        x, width = LEFT + each.start * scale, each.tokens * scale
        height = HEIGHT * min(each.tokens / MOST_TOKENS, 1)
        box = f'x="{x:.1f}" y="{base - height:.1f}" width="{width - 0.6:.1f}" height="{height:.1f}"'
        parts.append(f'<rect class="tokens" {box}/>')
        points.append(f"{x + width / 2:.1f},{base - HEIGHT * min(each.entropy / MOST_NATS, 1):.1f}")
    parts.append(f'<polyline class="nats" points="{" ".join(points)}"/>')
    return parts


def run(options: argparse.Namespace) -> None:
    """Draw one panel a prompt."""
    engine = Engine.load(options.model, backend=options.backend, threads=options.threads)
    prompts = [BUILT_IN[0], BUILT_IN[3]]
    parts: list[str] = []
    for number, (text, prompt) in enumerate(zip(prompts, encode_prompts(engine, prompts), strict=True)):
        iterations = write(engine, prompt, options.max_tokens)
        parts += panel(text, iterations, TOP + number * (HEIGHT + 44), options.max_tokens)
    height = TOP + len(prompts) * (HEIGHT + 44)
    parts.append(f'<text x="{LEFT}" y="{height - 8}">bars: tokens an iteration; line: entropy of the exact rows</text>')
    size = f'viewBox="0 0 {LEFT + WIDTH + 60} {height}"'
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{STYLE}{"".join(parts)}</svg>\n'
    Path(options.output).write_text(svg, encoding="utf-8")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", required=True, help="SVG file")
    parser.add_argument("--model", help="checkpoint folder; default: the shipped model")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--max-tokens", type=int, default=200)
    return parser.parse_args()


if __name__ == "__main__":
    try:
        run(parse())
    except BitMTPError as error:
        sys.exit(f"along: {error}")
