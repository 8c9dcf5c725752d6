"""The commands under one name, and errors as one line."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from bitmtp import __version__
from bitmtp.cli.bench import bench
from bitmtp.cli.chat import chat
from bitmtp.cli.convert import convert
from bitmtp.cli.eval import eval as evaluate
from bitmtp.cli.examples import EXAMPLES, START, epilog
from bitmtp.cli.generate import generate
from bitmtp.cli.info import info
from bitmtp.cli.serve import serve
from bitmtp.cli.study import study
from bitmtp.cli.train import train
from bitmtp.cli.tune import tune
from bitmtp.errors import BitMTPError

FAILED, INTERRUPTED = 2, 130

# typer brings click along as a dependency or as a private copy, depending on its release; this is the class in both.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]

app = typer.Typer(
    help="Fast generation from ternary language models by multi-token prediction.",
    rich_markup_mode=None,  # plain help: rich would double the start-up time
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
COMMANDS = (generate, chat, serve, info, bench, tune, convert, train, evaluate, study)
for command in COMMANDS:
    app.command(epilog=epilog(EXAMPLES[command.__name__]))(command)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"bitmtp {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True, epilog=epilog(START))
def _options(
    context: typer.Context,
    version: Annotated[  # noqa: ARG001 (its callback acts)
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code: 0, 1 (a check failed), 2 (an error) or 130 (Ctrl-C)."""
    try:
        return app(list(arguments), prog_name="bitmtp", standalone_mode=False) or 0
    except UsageError as error:
        # "Value error" is what pydantic, which typer checks choices with, puts before every message.
        return _fail(error.format_message().replace("Value error, ", ""))  # type: ignore[attr-defined]
    except UnicodeError as error:
        return _fail(f"the text given is not valid UTF-8 ({error})")
    except (BitMTPError, OSError) as error:
        return _fail(str(error))
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED


def _fail(message: str) -> int:
    print("bitmtp:", " ".join(message.split()), file=sys.stderr)
    return FAILED
