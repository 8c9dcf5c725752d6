"""``bitmtp convert``: a model from a Hugging Face folder or a GGUF file, as a checkpoint."""

from __future__ import annotations

import sys
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from bitmtp.convert.convert import Listener


def convert(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="Hugging Face folder or .gguf file.")],
    dest: Annotated[str, typer.Argument(metavar="DEST", help="Checkpoint folder to write.")],
    *,
    tokenizer: Annotated[str | None, typer.Option(metavar="FOLDER", help="Tokenizer; default: the source's.")] = None,
    bits: Annotated[
        Literal["8", "4"] | None, typer.Option(help="Of a model that is not ternary; default: as the file has them.")
    ] = None,
    embedding_bits: Annotated[
        Literal["16", "8", "4"] | None,
        typer.Option(help="Of an embedding that is not ternary; 16 only beside ternary layers."),
    ] = None,
    activation_scale: Annotated[
        Literal["row", "group"], typer.Option(help="Which inputs of ternary products share a step.")
    ] = "row",
    force: Annotated[bool, typer.Option("--force", help="Replace DEST if it exists.")] = False,
    unchecked: Annotated[bool, typer.Option("--unchecked", help="Do not try the result on plain text.")] = False,
) -> None:
    """Convert a model to a checkpoint.

    The other commands run what it writes.
    """
    from bitmtp.convert.convert import Options
    from bitmtp.convert.convert import convert as run

    options = Options(
        bits=int(bits) if bits else None,
        embedding_bits=int(embedding_bits) if embedding_bits else None,
        activation_scale=activation_scale,
        tokenizer=Path(tokenizer) if tokenizer else None,
        overwrite=force,
        checked=not unchecked,
    )
    with _listener() as listener:
        run(source, dest, options, listener)
    print(f"wrote {dest}")


def _listener() -> _Lines | _Bar:
    return _Bar() if sys.stderr.isatty() else _Lines()


class _Lines:
    """A line for each fact and each tenth of the way: for logs."""

    def __init__(self) -> None:
        self._tenths = 0

    def say(self, line: str) -> None:
        print(line, file=sys.stderr)

    def advance(self, done: int, total: int) -> None:
        if done * 10 // total > self._tenths:
            self._tenths = done * 10 // total
            print(f"{self._tenths * 10}% of {total / 1e6:,.1f} M weights", file=sys.stderr)

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class _Bar:
    """The same with a bar, in a terminal."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

        columns = (TextColumn("reading"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=Console(stderr=True))
        self._task: Any = None

    def say(self, line: str) -> None:
        self._progress.console.print(line, markup=False, highlight=False)

    def advance(self, done: int, total: int) -> None:
        if self._task is None:
            self._task = self._progress.add_task("reading", total=total)
        self._progress.update(self._task, completed=done)

    def __enter__(self) -> Listener:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
