"""The file that ``bitmtp tune`` writes: how a model is best run on a machine."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from bitmtp.core.costs import Tuning
from bitmtp.core.policies import make_policy
from bitmtp.core.policy import Policy
from bitmtp.errors import ConfigError


def usual_place(model: str | Path, backend: str) -> Path:
    """Where the profile of a model's folder lies unless one says otherwise, for what ``--backend`` was given."""
    settings = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return settings / "bitmtp" / f"{Path(model).resolve().name}-{backend}.json"


@dataclass(frozen=True, slots=True)
class Profile:
    """Settings and what they gave when they were chosen.

    Attributes:
        model: name of the model's content (``benchmark.records.model_fingerprint``).
        cpu, backend, threads: what it was measured on.
        policy: its name; the options that it does not have are None.
        tokens_per_second, ratio: median of texts written alone, and that ÷ autoregressive decoding's.
        tuning: pass costs measured here, and the calibration fitted on the sample prompts.

    Raises:
        ConfigError: a field has another type.
    """

    model: str
    cpu: str
    backend: str
    threads: int
    policy: str
    tokens_per_second: float
    ratio: float
    block_size: int | None = None
    tau: float | None = None
    min_prefix: int | None = None
    verify_bound: float | None = None
    tuning: Tuning | None = None

    def __post_init__(self) -> None:
        for item in fields(self):
            value, kinds = getattr(self, item.name), [kind.split("[")[0] for kind in str(item.type).split(" | ")]
            allowed = {"float": ("float", "int"), "None": ("NoneType",)}
            if type(value).__name__ not in [name for kind in kinds for name in allowed.get(kind, (kind,))]:
                raise ConfigError(f"{item.name} of a profile is {value!r}; expected {item.type}")

    def make_policy(self, model_block_size: int) -> Policy:
        """The policy chosen; a lossy one compares with calibrated probabilities.

        Raises:
            RequestError: this version has no such policy, or the model does not draft that far.
        """
        policy = make_policy(
            self.policy,
            model_block_size,
            block_size=self.block_size,
            tau=self.tau,
            min_prefix=self.min_prefix,
            verify_bound=self.verify_bound,
        )
        return policy if policy.lossless or not self.tuning else replace(policy, calibration=self.tuning.calibration)

    def check(self, model: str) -> None:
        """Refuse to serve another model than it was made for.

        Raises:
            ConfigError: it is another.
        """
        if model != self.model:
            raise ConfigError(f"this profile was made for model {self.model}, not {model}; run `bitmtp tune` for it")

    def write(self, path: str | Path) -> None:
        """Write the file whole or not at all."""
        file = Path(path)
        part = file.with_name(file.name + ".part")
        part.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        os.replace(part, file)

    @classmethod
    def read(cls, path: str | Path) -> Profile:
        """Read a file.

        Raises:
            ConfigError: it is missing or no profile.
        """
        try:
            data: Any = json.loads(Path(path).read_text(encoding="utf-8"))
            if data.get("tuning") is not None:
                data["tuning"] = Tuning.from_data(data["tuning"])
            return cls(**data)
        except FileNotFoundError:
            raise ConfigError(f"{path}: no such profile; `bitmtp tune` writes one") from None
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None
        except (ValueError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{path}: not a profile of this version ({str(error).replace('Profile.__init__() ', '')}); "
                "`bitmtp tune` writes one"
            ) from None
