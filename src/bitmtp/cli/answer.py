"""One answer on its way out: shown as it grows, ended by Ctrl-C between two passes."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from bitmtp.cli.render import Writer

if TYPE_CHECKING:
    from bitmtp.engine import Generation, Result


def write_answer(generation: Generation, writer: Writer) -> Result:
    """Generate to the end, or to Ctrl-C; what was committed is shown and returned in both cases."""
    with _interruptible(generation):
        writer.begin(generation)
        for chunk in generation:
            writer.write(chunk)
    result = generation.result
    writer.end(result)
    if result.drafts_rejected:
        rate = f"{result.draft_acceptance_rate:.1%}"
        print(
            f"bitmtp: warning: only {rate} of the drafts were accepted; drafting costs time here and saves none "
            "(--policy autoregressive is faster)",
            file=sys.stderr,
        )
    return result


def was_interrupted(result: Result) -> bool:
    """Whether Ctrl-C ended the text."""
    from bitmtp.core.text import Finish

    return result.finish is Finish.INTERRUPTED


def was_cut_off(result: Result) -> bool:
    """Whether the text ended for want of room."""
    from bitmtp.core.text import Finish

    return result.finish is Finish.LENGTH


@contextmanager
def _interruptible(generation: Generation) -> Iterator[None]:
    """Let the first Ctrl-C end the text after the pass that is running, so that text and K/V stay consistent; the
    second raises ``KeyboardInterrupt``."""
    from bitmtp.core.text import Finish

    text = generation.text

    def stop(_signal: int, _frame: FrameType | None) -> None:
        if text.finish is Finish.INTERRUPTED:
            raise KeyboardInterrupt
        text.finish = text.finish or Finish.INTERRUPTED

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
