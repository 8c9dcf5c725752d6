"""Results of long measurements as JSON lines: appended one by one, so that a run can go on where it stopped."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from bitmtp.errors import RequestError

Record = dict[str, Any]


class ResultLog:
    """A JSON-lines file of records, each known by its ``key``.

    Raises:
        RequestError: a line before the last one is not a record.
    """

    def __init__(self, path: str | Path) -> None:
        self._file = Path(path)
        self._records: dict[str, Record] = {}
        whole = self._file.read_bytes() if self._file.exists() else b""
        kept = whole[: whole.rfind(b"\n") + 1]
        if kept != whole:  # a run that was killed can leave half a line
            self._file.write_bytes(kept)
        for number, line in enumerate(kept.decode().splitlines(), start=1):
            try:
                record = json.loads(line)
                self._records[record["key"]] = record
            except (ValueError, KeyError, TypeError):
                raise RequestError(f"{self._file}:{number}: not a result; choose another output file") from None

    def __contains__(self, key: str) -> bool:
        return key in self._records

    def __getitem__(self, key: str) -> Record:
        return self._records[key]

    def get(self, key: str) -> Record | None:
        """The record of a key, if there is one."""
        return self._records.get(key)

    def add(self, key: str, **values: Any) -> None:
        """Append one record."""
        record = {"key": key, **values}
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
        self._records[key] = record


def model_fingerprint(folder: str | Path) -> str:
    """Short name of a checkpoint's content, so that results of another model are never taken for its own."""
    digest = hashlib.sha256()
    for file in sorted(Path(folder).glob("*")):
        if file.name == "config.json" or file.suffix == ".safetensors":
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]
