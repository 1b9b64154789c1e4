"""Where fetched models are kept, and whether any may be fetched: what the environment says of both."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from minserve.errors import DownloadError


def cache_folder() -> Path:
    """Where fetched models are kept; it may not exist yet.

    MINSERVE_CACHE if set, else XDG_CACHE_HOME/minserve, on Windows LOCALAPPDATA/minserve, else
    ~/.cache/minserve. Raises DownloadError if none of them is known.
    """
    own = os.environ.get("MINSERVE_CACHE")
    if own:
        return Path(own).expanduser().absolute()
    base = os.environ.get("LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME", "")
    if Path(base).is_absolute():  # the XDG specification says to ignore a relative one
        return Path(base) / "minserve"
    try:
        return Path.home() / ".cache" / "minserve"
    except RuntimeError:
        raise DownloadError("this user has no home folder for the cache; set MINSERVE_CACHE to a folder") from None


def is_offline() -> bool:
    """Whether MINSERVE_OFFLINE is set (to anything but 0): then nothing is fetched, and no attempt is made."""
    return os.environ.get("MINSERVE_OFFLINE", "0") not in ("", "0")
