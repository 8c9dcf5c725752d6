"""``bitmtp train``: a training run from a TOML recipe; needs the ``train`` extra."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import typer

from bitmtp.errors import BackendError


def train(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="TOML file that describes the run.")],
    *,
    method: Annotated[
        Literal["joint", "autoregressive", "masks", "medusa"] | None,
        typer.Option(help="What to teach, instead of what the recipe says; default: joint."),
    ] = None,
    stop_after: Annotated[float, typer.Option(help="Save the state and stop after this many seconds.")] = math.inf,
) -> None:
    """Train a ternary multi-token model.

    Ctrl-C or the end of the time saves the state and stops (exit code 130); the same command goes on from there.
    """
    from bitmtp.training.config import read_config

    overrides: dict[str, Any] = {} if method is None else {"method": method}
    config = read_config(recipe, **overrides)
    try:
        from bitmtp.training.train import run
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "bitmtp":
            raise
        raise BackendError(f"training needs {error.name}; install it with `pip install 'bitmtp[train]'`") from None
    if not run(config, stop_after=stop_after):
        raise typer.Exit(130)
