"""Find the shards of a location: brace and glob patterns, and URLs, which are downloaded once.

Random access needs whole files, so each remote shard is downloaded when the data is opened, and all of them have to
fit on the disk. Existing downloads are reused without checking whether the original has changed: delete them to
download again.
"""

import glob
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Final

from braceexpand import braceexpand
from filelock import FileLock

from jcl.console import pluralize
from jcl.data.shards.index import read_description
from jcl.errors import DataError, first_line, import_extra
from jcl.paths import expand_user

SHARD_LIMIT: Final = 250_000  # a pattern of more shards than this is taken for a mistake

# Schemes of fsspec that only transfer files: some others open archives or templates, or run commands.
_SCHEMES: Final = ("http", "https", "ftp", "sftp", "s3", "gs", "gcs", "az", "abfs", "abfss", "hf")
_URL: Final = re.compile(r"pipe:|[A-Za-z][A-Za-z0-9+.-]*://")


def is_shard_location(location: str) -> bool:
    """Whether a location means shards: a URL, a tar file or a pattern of them, or a folder that `write_shards` made."""
    if _URL.match(location):
        return True
    path = expand_user(location)
    if path.is_dir():
        return read_description(path) is not None
    return bool(re.search(r"\.tar(?![a-z])", path.name.lower())) or path.suffix.lower() == ".tgz"


def find_shards(location: str, folder: Path, download: bool, progress: Callable[[str], None]) -> list[Path]:
    """The local files of a tar file, a pattern, or URLs of such; those are downloaded into `folder` first."""
    if _URL.match(location):
        return _fetch_shards(expand_braces(location), folder, download, progress)
    if expand_user(location).is_file():  # even if its name looks like a pattern
        return [expand_user(location)]
    patterns = [str(expand_user(pattern)) for pattern in expand_braces(location)]
    return list(dict.fromkeys(Path(name) for pattern in patterns for name in _matching(pattern)))


def expand_braces(pattern: str) -> list[str]:
    """Expand `{a,b}` and `{0000..0127}` as a shell does."""
    ranges = re.findall(r"(\d+)\.\.(\d+)(?:\.\.(\d+))?", pattern)  # `braceexpand` makes a list of each
    try:
        too_many = any(abs(int(end) - int(first)) > SHARD_LIMIT * (int(step or 1) or 1) for first, end, step in ranges)
        names = [] if too_many else list(islice(braceexpand(pattern, escape=False), SHARD_LIMIT + 1))
    except (ValueError, RecursionError):  # its braces are not balanced
        names = []
    if not 0 < len(names) <= SHARD_LIMIT:
        raise DataError(f"The pattern {pattern[:80]} is invalid, or has more than {SHARD_LIMIT:,} shards.")
    return names


def _matching(pattern: str) -> list[str]:
    names = [pattern] if Path(pattern).is_file() else glob.glob(pattern)  # noqa: PTH207 - takes whole paths
    found = sorted(name for name in names if Path(name).is_file())
    if not found:
        raise DataError(f"No shard matches {pattern}.")
    return found


def _fetch_shards(urls: Sequence[str], folder: Path, download: bool, progress: Callable[[str], None]) -> list[Path]:
    """Download the shards that are missing in `folder`; processes that share a folder take turns."""
    for url in urls:
        scheme = url.partition(":")[0].lower()
        if scheme not in _SCHEMES or "::" in url:
            raise DataError(f"Unsupported URL {without_secrets(url)}; use one of {', '.join(_SCHEMES)}.")
        if "?" not in url and ".tar" not in url.rpartition("/")[2].lower():
            raise DataError(f"{without_secrets(url)} is not a .tar file; give shards, or a local folder of images.")
    files = {url: _local_copy(url, folder) for url in urls}
    shards = pluralize(len(files), "shard")
    missing = [file for file in files.values() if not file.is_file()]
    if missing and not download:
        raise DataError(f"Downloads are disabled, but {len(missing)} of {shards} are not in {folder}.")
    if missing:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock"):
            for number, (url, file) in enumerate(files.items(), start=1):
                if not file.is_file():
                    _fetch(url, file)
                free = shutil.disk_usage(folder).free / 1e9
                progress(f"Downloaded {number} of {shards} to {folder} ({free:.0f} GB free).")
    return list(files.values())


def without_secrets(url: str) -> str:
    """A URL without the password, key or signature it may contain."""
    return re.sub(r"//[^/@]*@", "//", url).partition("?")[0]


def _local_copy(url: str, folder: Path) -> Path:
    key = hashlib.sha256(url.encode("utf-8", "surrogateescape")).hexdigest()[:16]
    last = without_secrets(url).rpartition("/")[2]
    name = re.sub(r"[^A-Za-z0-9._-]", "_", last).lstrip(".")[-100:]
    return folder / key / (name or "shard.tar")


def _fetch(url: str, file: Path) -> None:
    partial, name = file.with_name(f"{file.name}.partial"), without_secrets(url)
    fsspec = import_extra("fsspec", "shards", f"Downloading {name}")
    options: dict[str, Any] = {}
    if url.lower().startswith("http"):
        aiohttp = import_extra("aiohttp", "shards", f"Downloading {name}")
        # By default a download that takes more than five minutes fails.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=60, sock_read=300)
        options["client_kwargs"] = {"timeout": timeout, "trust_env": True}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        files, path = fsspec.core.url_to_fs(url, **options)
        files.get_file(path, str(partial))
        if not partial.stat().st_size:
            raise ValueError("the file is empty")
        with partial.open("rb") as copy:
            os.fsync(copy.fileno())
        partial.replace(file)
    except Exception as error:  # each file system of fsspec has its own, which name a missing library
        raise DataError(f"The shard {name} was not downloaded to {file.parent}: {download_problem(error)}.") from error
    finally:
        partial.unlink(missing_ok=True)


def download_problem(error: Exception) -> str:
    """Why a download failed, without a full stop."""
    return "not found" if isinstance(error, FileNotFoundError) else without_secrets(first_line(error))[:200]
