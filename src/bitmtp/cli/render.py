"""What people and programs see: text as it is written, its figures, JSON and tables."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from bitmtp.cli.wrap import Piece, Wrap

if TYPE_CHECKING:
    from bitmtp.core.policy import Policy
    from bitmtp.engine import Chunk, Generation, Result

JSON_FIELDS = (
    "text",
    "token_ids",
    "num_tokens",
    "policy",
    "backend",
    "seed",
    "mean_acceptance_length",
    "draft_acceptance_rate",
    "acceptance_histogram",
    "num_spec_steps",
    "passes",
    "graph_replays",
    "tokens_per_pass",
    "ttft_ms",
    "tpot_ms",
    "tokens_per_second",
)
# The terminal's own foreground, green and magenta: readable on light and dark, and told apart by the colour-blind.
STYLES = {"exact": "default", "accepted": "green", "confident": "magenta"}
MEANINGS = {"exact": "the model's own", "accepted": "draft, verified", "confident": "draft, not verified"}
# A model may write escape sequences; a terminal must not obey them.
_CONTROLS = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}
SEPARATOR = " · "


class Writer(Protocol):
    """Shows one answer after another."""

    def begin(self, generation: Generation) -> None:
        """An answer follows."""

    def write(self, chunk: Chunk) -> None:
        """A token was committed."""

    def end(self, result: Result) -> None:
        """The answer is over."""


class PlainWriter:
    """The text alone, for pipes; it ends with a newline."""

    def begin(self, generation: Generation) -> None:
        """Nothing precedes the text."""

    def write(self, chunk: Chunk) -> None:
        """The text that the token settled, at once."""
        print(chunk.text, end="", flush=True)

    def end(self, result: Result) -> None:
        """Complete the last line."""
        print(end="" if result.text.endswith("\n") else "\n", flush=True)


class JsonWriter:
    """One object per answer, on one line."""

    def begin(self, generation: Generation) -> None:
        """Nothing precedes the object."""

    def write(self, chunk: Chunk) -> None:
        """The object comes at the end."""

    def end(self, result: Result) -> None:
        """Print the object."""
        print(json.dumps(result_object(result), ensure_ascii=False), flush=True)


class TerminalWriter:
    """Tokens coloured by how they were committed, lines broken between words, a legend once, and a line of figures
    after each answer."""

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(highlight=False)
        self._wrap = Wrap(self._console.width)
        self._sampled = False
        self._legend_due = self._console.color_system is not None and not self._console.no_color

    def begin(self, generation: Generation) -> None:
        """Print the legend if there is something to explain."""
        self._wrap = Wrap(self._console.width)  # the window may have another size by now
        self._sampled = generation.text.sampling.temperature > 0
        sources = _sources(generation.text.policy)
        if self._legend_due and len(sources) > 1:
            self._legend_due = False
            entries = [(f"{source}: {MEANINGS[source]}", STYLES[source]) for source in sources]
            for line in fill([entry for entry, _ in entries], self._console.width):
                for place, entry in enumerate(line):
                    self._console.out(SEPARATOR if place else "", end="", style="dim")
                    self._console.out(entry, end="", style=dict(entries)[entry])
                self._console.out()

    def write(self, chunk: Chunk) -> None:
        """The text that the token settled, up to the last whole word."""
        self._show(self._wrap.push(chunk.text.translate(_CONTROLS), STYLES[chunk.token.source]))

    def _show(self, pieces: Iterable[Piece]) -> None:
        for text, style in pieces:
            self._console.out(text, end="", style=style or None)

    def end(self, result: Result) -> None:
        """Complete the last line and print the figures."""
        self._show(self._wrap.flush())
        if not result.text.endswith("\n"):
            self._console.out()
        for line in fill(figures(result, sampled=self._sampled), self._console.width):
            self._console.out(SEPARATOR.join(line), style="dim")


def make_writer(as_json: bool) -> Writer:
    """The writer for where standard output goes."""
    if as_json:
        return JsonWriter()
    return TerminalWriter() if sys.stdout.isatty() else PlainWriter()


def result_object(result: Result) -> dict[str, Any]:
    """The object that ``--json`` prints."""
    values = {name: getattr(result, name) for name in JSON_FIELDS}
    return values | {"policy": result.policy.name}


def figures(result: Result, *, sampled: bool) -> list[str]:
    """What explains an answer, a few words each."""
    policy, items = result.policy, [count(result.num_tokens, "token")]
    if result.tokens_per_second:
        items.append(f"{result.tokens_per_second:.1f} tok/s")
    if result.num_spec_steps:
        items.append(f"{result.mean_acceptance_length:.2f} tokens per iteration")
        items.append(f"{result.draft_acceptance_rate:.0%} of drafts accepted")
    items += [count(result.passes, "pass", "passes"), f"first token {result.ttft_ms:.0f} ms", policy_label(policy)]
    if not policy.lossless:
        items.append("lossy")
    if sampled:
        items.append(f"seed {result.seed}")
    return items


def policy_label(policy: Policy) -> str:
    """Name and settings of a policy, such as ``hybrid D=8 τ=0.9 m=3``."""
    from bitmtp.core.policy import Verify

    if policy.block_size == 1:
        return policy.name
    words = [policy.name, f"D={policy.block_size}"]
    if policy.verify is not Verify.ALWAYS:
        words.append(f"τ={policy.tau:g}")
    if policy.verify is Verify.IF_SHORT:
        words.append(f"m={policy.min_prefix}")
    if policy.verify is not Verify.NEVER and not policy.adaptive:
        words.append(f"bound={policy.verify_bound:g}")
    return " ".join(words)


def count(number: int, word: str, plural: str | None = None) -> str:
    """``1 token``, ``2 tokens``."""
    return f"{number} {word if number == 1 else plural or word + 's'}"


def fill(items: Iterable[str], width: int) -> list[list[str]]:
    """Lay items out in lines of at most ``width`` columns, an item never broken while it fits a line."""
    lines: list[list[str]] = [[]]
    for item in items:
        if lines[-1] and len(SEPARATOR.join([*lines[-1], item])) > width:
            lines.append([])
        lines[-1].append(item)
    return lines


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table: ruled in a terminal, aligned by spaces elsewhere. The first column is text, the others are figures."""
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    print(title)
    if not sys.stdout.isatty():
        for row in (columns, *rows):
            first, *others = zip(row, widths, strict=True)
            print("  ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]).rstrip())
    elif sum(widths) + 2 * len(widths) <= shutil.get_terminal_size().columns:
        _print_rich(columns, rows)
    else:
        _print_stacked(columns, rows, shutil.get_terminal_size().columns)


def _print_rich(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 2, 0, 0), pad_edge=False)
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    Console(highlight=False, markup=False).print(table)


def _print_stacked(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> None:
    """For terminals too narrow for the table: each row as a heading and its figures."""
    for first, *others in rows:
        print(first)
        for line in fill([f"{name} {cell}" for name, cell in zip(columns[1:], others, strict=True)], width - 2):
            print("  " + SEPARATOR.join(line))


def print_facts(title: str, facts: Sequence[tuple[str, str]]) -> None:
    """Names and values under a title; long values continue under themselves."""
    import textwrap

    margin = max(len(name) for name, _ in facts) + 4
    width = max(shutil.get_terminal_size().columns, margin + 20) if sys.stdout.isatty() else sys.maxsize
    print(title)
    for name, value in facts:
        lines = textwrap.wrap(value, width - margin) or [""]
        print(f"  {name:<{margin - 2}}{lines[0]}")
        for line in lines[1:]:
            print(" " * margin + line)


def _sources(policy: Policy) -> list[str]:
    """How a policy can commit tokens."""
    from bitmtp.core.policy import Verify

    if policy.block_size == 1:
        return ["exact"]
    return {
        Verify.ALWAYS: ["exact", "accepted"],
        Verify.NEVER: ["exact", "confident"],
        Verify.IF_SHORT: ["exact", "accepted", "confident"],
    }[policy.verify]
