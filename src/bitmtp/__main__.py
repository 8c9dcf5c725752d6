"""``python -m bitmtp``: the command line."""

from bitmtp.cli.app import main

main()
