"""Text that comes in pieces, laid out in lines that break between words."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_PIECES = re.compile(r"\n|[^\S\n]+|\S+")
LONGEST = 24  # columns of a word that may be held back; scripts without spaces come in pieces of this size

Piece = tuple[str, str]  # text and its style


@dataclass(slots=True)
class Wrap:
    """Holds back a word until its end is known, because only then it is known which line it belongs to.

    A line that the writer fills beyond ``width`` columns breaks at its last space; the space is dropped there.
    """

    width: int
    _column: int = 0
    _spaces: list[Piece] = field(default_factory=list)
    _word: list[Piece] = field(default_factory=list)

    def push(self, text: str, style: str) -> Iterator[Piece]:
        """Take a piece of text; what can be shown now, in order."""
        for part in _PIECES.findall(text):
            if not part.isspace():
                self._word.append((part, style))
            if part.isspace() or _columns(self._word) > LONGEST:
                yield from self.flush()
            if part == "\n":
                yield self._break()
            elif part.isspace():
                self._spaces.append((part, style))

    def flush(self) -> Iterator[Piece]:
        """What was held back of a word."""
        if not self._word:
            return
        if self._column > 0 and self._column + _columns(self._spaces + self._word) > self.width:
            yield self._break()
        shown = self._spaces + self._word
        self._spaces, self._word = [], []
        self._column += _columns(shown)
        yield from shown

    def _break(self) -> Piece:
        self._column, self._spaces = 0, []
        return "\n", ""


def _columns(pieces: list[Piece]) -> int:
    from rich.cells import cell_len

    return sum(cell_len(text.replace("\t", " " * 8)) for text, _ in pieces)
