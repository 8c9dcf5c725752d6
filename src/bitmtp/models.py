"""Where the shipped model lies: inside an installed package, or ``models/`` of a checkout."""

from pathlib import Path

from bitmtp.errors import CheckpointError

SHIPPED = "smollm2-135m-bitmtp"


def shipped_model() -> Path:
    """Folder of the model that comes with the package.

    Raises:
        CheckpointError: it is in neither place.
    """
    package = Path(__file__).resolve().parent
    for folder in (package / "models" / SHIPPED, package.parents[1] / "models" / SHIPPED):
        if folder.is_dir():
            return folder
    raise CheckpointError("no model came with this installation; name one with --model")
