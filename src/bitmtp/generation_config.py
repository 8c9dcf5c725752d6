"""How a checkpoint wants to be sampled where nobody says: its ``generation_config.json``, which it need not have."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from bitmtp.errors import CheckpointError, RequestError
from bitmtp.sampling import Sampling

FILE = "generation_config.json"


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """Sampling parameters, named as in :class:`bitmtp.sampling.Sampling`; None: the checkpoint does not say."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    @property
    def said(self) -> dict[str, float]:
        """The parameters that the checkpoint names."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def read(cls, folder: Path) -> GenerationConfig:
        """From a folder; other fields of the file are not looked at. ``do_sample`` false means temperature 0.

        Raises:
            CheckpointError: the file is no JSON object, or a value is out of range.
        """
        file = folder / FILE
        found = _read_object(file) if file.exists() else {}
        said = {field.name: found[field.name] for field in fields(cls) if found.get(field.name) is not None}
        if found.get("do_sample") is False:
            said["temperature"] = 0.0
        for name, value in said.items():
            kinds: tuple[type, ...] = (int,) if name == "top_k" else (int, float)
            if isinstance(value, bool) or not isinstance(value, kinds):
                raise CheckpointError(f"{file}: {name} is {value!r}; expected a number")
        try:
            Sampling(**said)
        except RequestError as error:
            raise CheckpointError(f"{file}: {error}") from None
        return cls(**said)

    def write(self, folder: Path) -> None:
        """Into a folder, if there is anything to say."""
        if self.said:
            (folder / FILE).write_text(json.dumps(self.said, indent=1) + "\n", encoding="utf-8")


def _read_object(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: not valid JSON ({error})") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{file}: expected a JSON object")
    return found
