"""What a text has to look like: a JSON schema or a grammar from a file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from bitmtp.errors import BitMTPError, RequestError

if TYPE_CHECKING:
    from bitmtp.core.text import Grammar
    from bitmtp.engine import Engine


@dataclass(frozen=True, slots=True)
class FormOptions:
    """What the text has to look like; every policy keeps to it."""

    schema: Annotated[str | None, Option(metavar="FILE", help="Write JSON that matches this JSON schema.")] = None
    grammar: Annotated[
        str | None, Option(metavar="FILE", help="Write what this grammar allows (llguidance's form of Lark).")
    ] = None

    def make(self, engine: Engine) -> Grammar | None:
        """The grammar that these flags ask for.

        Raises:
            BitMTPError: the file is none, or the extra is missing.
        """
        if self.schema is None and self.grammar is None:
            return None
        if self.schema is not None and self.grammar is not None:
            raise RequestError("give --schema or --grammar, not both")
        try:
            from bitmtp.server.grammar import Grammars
            from bitmtp.server.vocabulary import Vocabulary
        except ModuleNotFoundError as error:
            raise BitMTPError(
                f"{error.name} is not installed; install the extra: pip install 'bitmtp[serve]'"
            ) from None
        grammars = Grammars(Vocabulary(engine))
        return grammars.json(_read_schema(self.schema)) if self.schema else grammars.lark(_read(self.grammar or ""))


def _read_schema(file: str) -> dict[str, Any]:
    try:
        schema = json.loads(_read(file))
    except ValueError as error:
        raise RequestError(f"{file}: not valid JSON ({error})") from None
    if not isinstance(schema, dict):
        raise RequestError(f"{file}: a schema is a JSON object")
    return schema


def _read(file: str) -> str:
    return Path(file).read_text(encoding="utf-8")
