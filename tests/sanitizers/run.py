"""Runs pytest with native extensions that sanitizers watch: ``python run.py FOLDER ARGUMENTS…``.

``FOLDER`` is where they were built. Whatever has been installed in the environment is not looked at, an editable
installation's finder included.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

import pytest

EXTENSIONS = ("bitmtp.core._core", "bitmtp.backends.cpu._native")  # the second takes the first one's texts


def main() -> int:
    """Load the extensions, then run the tests."""
    root, folder = Path(__file__).parents[2], Path(sys.argv[1])
    sys.meta_path[:] = [finder for finder in sys.meta_path if "Redirect" not in type(finder).__name__]
    sys.path[:0] = [str(root / "src"), str(root / "tests")]
    for name in EXTENSIONS:
        package, _, short = name.rpartition(".")
        (file,) = folder.glob(f"{short}.*so")
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        setattr(importlib.import_module(package), short, module)
    return int(pytest.main(sys.argv[2:]))


if __name__ == "__main__":
    sys.exit(main())
