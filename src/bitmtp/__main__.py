"""The ``bitmtp`` program, and ``python -m bitmtp``."""

import signal
import sys


def main() -> None:
    """Run the command line."""
    # Until there is somebody to answer Ctrl-C, it ends the program without a word.
    answered = signal.getsignal(signal.SIGINT)
    if answered is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from bitmtp.cli.app import run

    signal.signal(signal.SIGINT, answered)
    # A reader that goes away ends the program in silence, as it does other filters.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
