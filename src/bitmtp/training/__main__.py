"""``python -m bitmtp.training --config recipe.toml``"""

from __future__ import annotations

import argparse
import math
import sys

from bitmtp.errors import BitMTPError
from bitmtp.training.config import read_config


def main() -> int:
    """Exit code 0: complete; 3: stopped early, the same command goes on; 2: bad input."""
    parser = argparse.ArgumentParser(prog="python -m bitmtp.training", description="Train a ternary multi-token model.")
    parser.add_argument("--config", required=True, help="TOML recipe (see recipes/ and docs/training.md)")
    parser.add_argument("--stop-after", type=float, default=math.inf, help="seconds, then save the state and exit")
    arguments = parser.parse_args()
    try:
        config = read_config(arguments.config)
        from bitmtp.training.train import run

        return 0 if run(config, stop_after=arguments.stop_after) else 3
    except BitMTPError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
