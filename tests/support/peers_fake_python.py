"""An interpreter for --peers-python that runs the fake engine in place of whichever peer it is told to run."""

from __future__ import annotations

import sys
from pathlib import Path

_SCRIPT = """\
#!{python}
import os, sys
child, engine, options = sys.argv[1:]
os.execv({python!r}, [{python!r}, child, {engine!r}, options])
"""


def write_fake_python(folder: Path) -> str:
    """Write the interpreter into the folder; its path."""
    path = folder / "fake-python"
    engine = Path(__file__).with_name("peers_fake_engine.py")
    path.write_text(_SCRIPT.format(python=sys.executable, engine=str(engine)))
    path.chmod(0o755)
    return str(path)
