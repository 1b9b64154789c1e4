"""An extension module that was compiled when minserve was installed, or why it is not there."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any


def load(name: str, version_function: str, version: int, noun: str, compiler: str) -> Any | str:
    """minserve.NAME, or one line that says why it does not load and what to do.

    version_function: its C function that gives the version of its header, which must be `version`. noun, compiler:
    what to call it, and what builds it.
    """
    folder = Path(__file__).parent.parent
    try:
        module = importlib.import_module(f"minserve.{name}")
        if not folder.samefile(Path(str(module.__file__)).parent):
            # An editable install of another checkout fills in what is missing here; it may be another version.
            raise ImportError(f"found only the {noun} of another copy of minserve, {module.__file__}")
        found = getattr(module.lib, version_function)()
    except AttributeError:  # older than these functions
        found = None
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and (error.name or "").endswith("_cffi_backend"):
            return "the package cffi is missing: run `pip install cffi`"
        if next(folder.glob(f"{name}.*"), None) is not None:
            return f"the compiled {noun} does not load ({error}): build it again with `pip install -e .`"
        if (folder.parent / "setup.py").is_file():
            return (
                f"the source folder holds no compiled {noun}: run `pip install -e .` in it, with a {compiler} "
                "installed (MINSERVE_REQUIRE_CORE=1 before it shows what fails)"
            )
        return f"minserve was installed without a {compiler}: install one, then minserve again"
    if found != version:
        return f"the compiled {noun} is of another version ({found}, not {version}): rebuild it, `pip install -e .`"
    return module
