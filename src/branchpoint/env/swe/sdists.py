"""Source distributions from the package index that pip is set up to use: cached, checksummed, resumed when cut off."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urldefrag, urljoin, urlsplit
from urllib.request import url2pathname

from branchpoint.env.swe.place import cache as home
from branchpoint.world import UserError

_ENDS = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
_ACCEPT = "application/vnd.pypi.simple.v1+json, text/html;q=0.5"
_INDEX = "https://pypi.org/simple"
_SECONDS, _LOCK_SECONDS, _TRIES = 30.0, 900.0, 4
_BLOCK = 1 << 16
_ROW = re.compile(r"^(?P<scope>[^.]*)\.(?P<key>[\w-]+)='(?P<value>.*)'$")


class SdistError(UserError):
    """A source distribution that cannot be had: not on the index, not reachable, or not what its checksum says."""


class Link(NamedTuple):
    """A file on an index; ``sha256`` is "" where the index does not tell it."""

    name: str
    url: str
    sha256: str


class Index(NamedTuple):
    """Where to look. ``pages`` have a page per project (PEP 503 or 691), ``folders`` list files of all projects."""

    pages: tuple[str, ...]
    folders: tuple[str, ...] = ()
    certificates: str = ""


def fetch(name: str, version: str, sha256: str = "", cache: Path | None = None, index: Index | None = None) -> Path:
    """The source distribution of a release, from the cache folder or else the index (default: pip's own settings).

    The file is complete and has the checksum that was given, or the index's. A transfer that was cut off goes on where
    it ended. Raises SdistError in one line.
    """
    folder = cache or home() / "sdists"
    folder.mkdir(parents=True, exist_ok=True)
    if found := _cached(folder, name, version, sha256):
        return found
    with _locked(folder / f".{normal(name)}-{version}.lock"):
        if found := _cached(folder, name, version, sha256):
            return found
        place = index or settings()
        link = _choose(name, version, sha256, place)
        return _transfer(link, sha256 or link.sha256, folder, place.certificates)


def normal(name: str) -> str:
    """A project's name as indexes compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def is_release(file: str, name: str, version: str) -> bool:
    """Whether a file's name is that of the source distribution of a release."""
    for end in _ENDS:
        if file.endswith(end):
            project, dash, release = file.removesuffix(end).rpartition("-")
            return bool(dash) and normal(project) == normal(name) and release == version
    return False


def _cached(folder: Path, name: str, version: str, sha256: str) -> Path | None:
    found = sorted(path for path in folder.iterdir() if is_release(path.name, name, version))
    return next((path for path in found if not sha256 or digest(path) == sha256), None)


def digest(path: Path) -> str:
    """The SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process at a time; the kernel frees the lock when its owner dies."""
    until = time.monotonic() + _LOCK_SECONDS
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > until:
                    raise SdistError(f"{path}: another process has held this lock for {_LOCK_SECONDS:.0f} s") from None
                time.sleep(0.2)
        yield


def settings() -> Index:
    """pip's index, extra indexes, links and certificates, from its files and ``PIP_*`` variables."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "config", "list"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout
    except subprocess.TimeoutExpired:
        said = ""
    return configured(said)


def configured(listing: str) -> Index:
    """From the output of ``pip config list``; a variable goes before a file."""
    values: dict[str, str] = {}
    rows = [found for row in listing.splitlines() if (found := _ROW.match(row.strip()))]
    for row in sorted(rows, key=lambda r: (":env:", "install", "download", "global").index(_scope(r["scope"]))):
        values.setdefault(row["key"], row["value"].replace("\\n", " "))
    pages = (values.get("index-url", _INDEX), *values.get("extra-index-url", "").split())
    folders = tuple(values.get("find-links", "").split())
    return Index(() if values.get("no-index") == "true" else pages, folders, values.get("cert", ""))


def _scope(name: str) -> str:
    return name if name in (":env:", "install", "download") else "global"


def _choose(name: str, version: str, sha256: str, index: Index) -> Link:
    """The first file that fits. An index that fails is passed over when another has the file."""
    troubles: list[str] = []
    looked: list[str] = [*index.folders, *(f"{page.rstrip('/')}/{normal(name)}/" for page in index.pages)]
    for page in looked:
        try:
            links = list(_links(page, index.certificates))
        except (OSError, ValueError) as error:
            if getattr(error, "code", 0) != 404 and not isinstance(error, FileNotFoundError):
                troubles.append(f"{_shown(page)}: {_reason(error)}")
            continue
        for link in links:
            if is_release(link.name, name, version) and (not sha256 or link.sha256 in ("", sha256)):
                return link
    places = ", ".join(_shown(page) for page in looked) or "no index is set"
    cause = f" ({'; '.join(troubles)})" if troubles else ""
    fits = f" with sha256 {sha256[:12]}..." if sha256 else ""
    raise SdistError(f"no source distribution of {name} {version}{fits} at {places}{cause}")


def _shown(url: str) -> str:
    """Without user name and password."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _reason(error: BaseException) -> str:
    return " ".join(str(getattr(error, "reason", "") or error).split()) or type(error).__name__


def _links(page: str, certificates: str) -> Iterator[Link]:
    """The files that a page or a folder lists."""
    local = _local(page)
    if local is not None and local.is_dir() and not (local / "index.html").is_file():
        for path in sorted(local.iterdir()):
            yield Link(path.name, path.as_uri(), "")
        return
    if local is not None:
        kind, text = "text/html", (local / "index.html" if local.is_dir() else local).read_text("utf-8")
    else:
        with _open(page, certificates, {"Accept": _ACCEPT}) as answer:
            kind, text = answer.headers.get_content_type(), answer.read().decode("utf-8")
    if kind.endswith("json"):
        for file in json.loads(text)["files"]:
            yield Link(file["filename"], urljoin(page, file["url"]), file.get("hashes", {}).get("sha256", ""))
        return
    parser = _Anchors()
    parser.feed(text)
    for href in parser.found:
        url, fragment = urldefrag(urljoin(page, href))
        told = fragment.removeprefix("sha256=") if fragment.startswith("sha256=") else ""
        yield Link(unquote(urlsplit(url).path.rpartition("/")[2]), url, told)


class _Anchors(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.found += [value for key, value in attrs if key == "href" and value]


def _local(url: str) -> Path | None:
    parts = urlsplit(url)
    if parts.scheme == "file":
        return Path(url2pathname(parts.path))
    return None if parts.scheme else Path(url)


def _open(url: str, certificates: str, headers: dict[str, str]) -> Any:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https", "file"):
        raise ValueError(f"cannot read {parts.scheme!r} addresses")
    user, at, host = parts.netloc.rpartition("@")
    handlers: list[urllib.request.BaseHandler] = []
    if at:
        passwords = urllib.request.HTTPPasswordMgrWithPriorAuth()
        url = parts._replace(netloc=host).geturl()
        name, _, word = user.partition(":")
        passwords.add_password(None, url, unquote(name), unquote(word), is_authenticated=True)
        handlers.append(urllib.request.HTTPBasicAuthHandler(passwords))
    context = ssl.create_default_context(cafile=certificates or None)
    handlers.append(urllib.request.HTTPSHandler(context=context))
    return urllib.request.build_opener(*handlers).open(urllib.request.Request(url, headers=headers), timeout=_SECONDS)


def _transfer(link: Link, sha256: str, folder: Path, certificates: str) -> Path:
    """Fetches into ``.part``, which survives a cut, then checks and renames."""
    part = folder / f".{link.name}.{sha256[:12]}.part"
    if not sha256:
        part.unlink(missing_ok=True)  # nothing tells whether it is the same file
    trouble: BaseException | None = None
    for attempt in range(_TRIES):
        try:
            if _pull(link.url, part, certificates):
                break
            trouble = OSError("the transfer ended early")
        except (OSError, ValueError) as error:
            trouble = error
            if isinstance(error, urllib.error.HTTPError) and error.code < 500:
                part.unlink(missing_ok=True)
        time.sleep(0.5 * attempt)
    else:
        raise SdistError(f"{_shown(link.url)}: {_reason(trouble or OSError('no answer'))}") from trouble
    if sha256 and (found := digest(part)) != sha256:
        part.unlink()
        raise SdistError(f"{_shown(link.url)}: its sha256 is {found}, expected {sha256}")
    os.replace(part, folder / link.name)
    return folder / link.name


def _pull(url: str, part: Path, certificates: str) -> bool:
    """Goes on with a transfer; whether it is complete."""
    held = part.stat().st_size if part.exists() else 0
    with _open(url, certificates, {"Range": f"bytes={held}-"} if held else {}) as answer:
        goes_on = getattr(answer, "status", None) == 206
        length = answer.headers.get("Content-Length")
        with part.open("ab" if goes_on else "wb") as file:
            while block := answer.read(_BLOCK):
                file.write(block)
    return length is None or part.stat().st_size == int(length) + (held if goes_on else 0)
