"""Text as it grows: token ids to text without broken characters, and stop strings across token borders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from bitmtp.tokenizer import Tokenizer

_INCOMPLETE = "\ufffd"


@dataclass(slots=True)
class TextStream:
    """Turns tokens into text piece by piece; what it has returned is never taken back.

    A character whose bytes are not all there, and an ending that may become a stop string, are held back; such a
    character is not shown at the end of the text either.

    Attributes:
        stops: strings that end the text; the text ends before them.
        text: everything returned so far.
        stopped: a stop string was met.
    """

    tokenizer: Tokenizer
    stops: tuple[str, ...] = ()
    text: str = ""
    stopped: bool = False
    _ids: list[int] = field(default_factory=list)
    _start: int = 0  # the piece that was settled last begins here
    _end: int = 0  # and ends here
    _settled: str = ""  # its text
    _held: str = ""  # complete characters that may be the beginning of a stop string

    def push(self, token: int) -> str:
        """The new text that this token settles, possibly none."""
        self._ids.append(token)
        return self._release(self._complete(), last=False)

    def finish(self) -> str:
        """What was held back, at the end of the text."""
        if self.stopped:
            return ""
        text = self.tokenizer.decode_whole(self._ids[self._start :])
        return self._release(text[len(self._settled) :], last=True)

    def _complete(self) -> str:
        text = self.tokenizer.decode(self._ids[self._start :])
        if text.endswith(_INCOMPLETE):
            return ""
        new = text[len(self._settled) :]
        if new:
            # Decode from the piece before on: some decoders treat the first token of a text apart, others a run of
            # bytes as one.
            self._start, self._end = self._end, len(self._ids)
            self._settled = self.tokenizer.decode(self._ids[self._start :])
        return new

    def _release(self, new: str, *, last: bool) -> str:
        held = self._held + new
        found = [place for stop in self.stops if (place := held.find(stop)) >= 0]
        if found:
            self.stopped, ready, self._held = True, held[: min(found)], ""
        else:
            keep = 0 if last else _beginning_of_stop(held, self.stops)
            ready, self._held = held[: len(held) - keep], held[len(held) - keep :]
        self.text += ready
        return ready


def _beginning_of_stop(text: str, stops: Sequence[str]) -> int:
    """Length of the longest ending of ``text`` with which a stop string begins."""
    longest = max((len(stop) - 1 for stop in stops), default=0)
    for length in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-length:]) for stop in stops):
            return length
    return 0
