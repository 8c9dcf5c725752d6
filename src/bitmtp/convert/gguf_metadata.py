"""Metadata of a GGUF file: each value is of the type that is asked for, and what the format requires is there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from bitmtp.errors import CheckpointError

T = TypeVar("T", int, float, str)


@dataclass(frozen=True, slots=True)
class Metadata:
    """The fields of a file by key; ``prefix`` stands before keys that begin with a dot."""

    file: Path
    fields: Mapping[str, Any]
    prefix: str = ""

    def find(self, key: str, kind: type[T]) -> T | None:
        """A value, if it is there.

        Raises:
            CheckpointError: it is of another type.
        """
        value = self._contents(key)
        return None if value is None else self._typed(key, value, kind)

    def need(self, key: str, kind: type[T]) -> T:
        """A value that the format requires.

        Raises:
            CheckpointError: it is missing, or of another type.
        """
        value = self.find(key, kind)
        if value is None:
            raise CheckpointError(f"{self.file}: {self._full(key)} is missing")
        return value

    def need_list(self, key: str, kind: type[T]) -> list[T]:
        """As :meth:`need`, a list of values."""
        values = self._contents(key)
        if not isinstance(values, list):
            raise CheckpointError(f"{self.file}: {self._full(key)} is {'missing' if values is None else 'no list'}")
        return [self._typed(key, value, kind) for value in values]

    def _contents(self, key: str) -> Any:
        field = self.fields.get(self._full(key))
        try:
            return None if field is None else field.contents()
        except (ValueError, IndexError) as error:
            raise CheckpointError(f"{self.file}: {self._full(key)} cannot be read ({error})") from None

    def _typed(self, key: str, value: Any, kind: type[T]) -> T:
        if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else kind):
            raise CheckpointError(f"{self.file}: {self._full(key)} is {str(value)[:40]!r}; expected {kind.__name__}")
        return kind(value)

    def _full(self, key: str) -> str:
        return self.prefix + key if key.startswith(".") else key
