"""The container engine, spoken to with the Docker SDK: the only file that imports it."""

from __future__ import annotations

import base64
import itertools
import json
import os
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from branchpoint.world import SandboxFailure, UserError

_PLACES = ("/var/run/docker.sock", "/run/podman/podman.sock", "{runtime}/podman/podman.sock")
_DIRECTORY, _LINK, _SPECIAL = 1 << 31, 1 << 27, 1 << 26 | 1 << 25 | 1 << 24 | 1 << 21 | 1 << 19  # of Go's os.FileMode
_SET = (1 << 23, 0o4000), (1 << 22, 0o2000), (1 << 20, 0o1000)  # set-user-id, set-group-id, sticky


TRIES, PAUSE = 20, 0.1
"""How often to try again what an engine refuses while a container changes its state, and the seconds between."""


class EngineError(SandboxFailure):
    """The engine refused, failed, or did not answer in time."""


class NotThere(EngineError):
    """The engine knows no such container, image or path."""


@dataclass(frozen=True, slots=True)
class Base:
    """An image: its id, its layers, and what of its configuration matters here."""

    id: str
    layers: int
    environment: tuple[str, ...] = ()
    volumes: tuple[str, ...] = ()
    healthcheck: bool = False


@dataclass(frozen=True, slots=True)
class Spec:
    """A container to create. ``limits``: fields of the engine's host configuration. ``ulimits``: name -> limit."""

    image: str
    command: Sequence[str]
    labels: Mapping[str, str]
    user: str
    workdir: str
    environment: Mapping[str, str] = field(default_factory=dict)
    binds: Mapping[str, Path] = field(default_factory=dict)
    capabilities: tuple[str, ...] = ()
    limits: Mapping[str, Any] = field(default_factory=dict)
    ulimits: Mapping[str, int] = field(default_factory=dict)
    healthcheck: bool = False


@dataclass(frozen=True, slots=True)
class Stat:
    """A path in a container. ``kind``: file, directory, symlink or other. ``mode``: permission bits. ``target``: where
    a symbolic link leads, resolved inside the container."""

    kind: str
    mode: int
    size: int
    target: str


def address(given: str | None) -> str:
    """Where the engine listens: the argument, DOCKER_HOST, or the first socket found in the usual places."""
    if given or os.environ.get("DOCKER_HOST"):
        chosen = given or os.environ["DOCKER_HOST"]
        return chosen if "://" in chosen else f"unix://{chosen}"
    runtime = os.environ.get("XDG_RUNTIME_DIR", f"/run/user/{os.getuid()}")
    places = [p.format(runtime=runtime) for p in _PLACES]
    return f"unix://{next((p for p in places if os.path.exists(p)), places[0])}"


class Engine:
    """One engine. Usable from any thread (each has its own connections); every call ends in time.

    Raises UserError when no engine answers, and ModuleNotFoundError when the Docker SDK is not installed.

    Args:
        place: ``unix:///...``, ``tcp://...``, or the path of a socket; None: :func:`address`.
        seconds: how long an answer of the engine may take.
    """

    def __init__(self, place: str | None, seconds: float) -> None:
        self.place, self.seconds = address(place), seconds
        self._version = "auto"
        self._mine = threading.local()
        self._clients: list[Any] = []
        self._lock = threading.Lock()
        try:
            self.info: dict[str, Any] = self._client().info()
        except _errors() as error:
            raise UserError(
                f"no container engine answers at {self.place} ({_text(error)}); start Docker or Podman's service, or "
                "name its socket: DOCKER_HOST, or sandbox.socket"
            ) from error

    def _client(self) -> Any:
        client = getattr(self._mine, "client", None)
        if client is None:
            docker = _sdk()
            settings: dict[str, Any] = docker.utils.kwargs_from_env() if self.place.startswith("tcp") else {}
            settings |= {"base_url": self.place, "version": self._version, "timeout": self.seconds}
            client = self._mine.client = docker.APIClient(**settings)
            self._version = client.api_version  # asked for once, since Podman takes half a second to tell
            with self._lock:
                self._clients.append(client)
        return client

    @contextmanager
    def _call(self, doing: str) -> Iterator[Any]:
        missing = _sdk().errors.NotFound
        try:
            yield self._client()
        except missing as error:
            raise NotThere(f"{doing}: {_text(error)}") from error
        except _errors() as error:
            raise EngineError(f"{doing}: {_text(error)}") from error

    def close(self) -> None:
        """Closes all connections."""
        with self._lock:
            clients, self._clients = self._clients, []
        for client in clients:
            client.close()

    # Images

    def base(self, image: str) -> Base:
        """What an image is. Raises NotThere."""
        with self._call(f"looking at image {image}") as client:
            found = client.inspect_image(image)
        config = found.get("Config") or {}
        test = (config.get("Healthcheck") or {}).get("Test") or ["NONE"]
        return Base(
            found["Id"],
            len((found.get("RootFS") or {}).get("Layers") or ()),
            tuple(config.get("Env") or ()),
            tuple(config.get("Volumes") or ()),
            test[0] != "NONE",
        )

    def pull(self, image: str) -> None:
        """Fetches an image from its registry."""
        with self._call(f"pulling image {image}") as client:
            name, _, tag = image.rpartition(":") if ":" in image.rpartition("/")[2] else (image, "", "latest")
            client.pull(name or image, tag=tag)

    def load(self, saved: Path) -> str:
        """Loads what ``docker save`` wrote, and returns the image's id."""
        with self._call(f"loading {saved}") as client, saved.open("rb") as stream:
            before = {i["Id"] for i in client.images(all=True)}
            told = "".join(part.get("stream", "") for part in client.load_image(stream) if isinstance(part, dict))
        name = told.strip().rpartition("Loaded image")[2].partition(":")[2].splitlines()[0].strip() if told else ""
        if not name:
            now = [i["Id"] for i in self.images({}) if i["Id"] not in before]
            if len(now) != 1:
                raise EngineError(f"loading {saved}: the engine does not tell which image it holds")
            return now[0]
        return self.base(name).id

    def import_(
        self, stream: Iterable[bytes], labels: Mapping[str, str], name: str, environment: Iterable[str] = ()
    ) -> str:
        """Makes a named image of one layer from the tar of a root file system, and returns its id."""
        changes = [f"LABEL {k}={v}" for k, v in labels.items()] + [f"ENV {_env(e)}" for e in environment]
        with self._call("importing a file system") as client:
            told = client.import_image_from_stream(stream, changes=changes)
        for line in reversed(told.splitlines()):
            status = json.loads(line).get("status", "") if line.strip() else ""
            if status.startswith("sha256:"):
                with self._call("naming an image") as client:
                    client.tag(status, *name.split(":"))  # Podman takes no name when it imports
                return status
        raise EngineError(f"importing a file system: {_text(told)}")

    def commit(self, container: str, labels: Mapping[str, str], name: str) -> str:
        """Makes an image from a container's files, while it is paused, and returns its id.

        It gets a name, since Podman removes a nameless image with the last one that was built on it.
        """
        with self._call("committing a container") as client:
            changes = [f"LABEL {k}={v}" for k, v in labels.items()]
            repository, _, tag = name.partition(":")
            return client.commit(container, repository=repository, tag=tag, pause=True, changes=changes)["Id"]

    def images(self, labels: Mapping[str, str]) -> list[dict[str, Any]]:
        """All images with these labels, with their ``Id``, ``ParentId``, ``Labels`` and ``Created``."""
        with self._call("listing images") as client:
            return client.images(all=True, filters=_filters(labels))

    def remove_image(self, image: str) -> None:
        """Removes an image but not its parents. Raises EngineError while something still uses it."""
        with self._call(f"removing image {image}") as client:
            client.remove_image(image, noprune=True)

    # Containers

    def create(self, spec: Spec) -> str:
        """Creates a container without network, and returns its id."""
        docker = _sdk()
        types = docker.types
        with self._call(f"creating a container of {spec.image}") as client:
            host = client.create_host_config(
                network_mode="none",
                cap_drop=["ALL"],
                cap_add=list(spec.capabilities),
                security_opt=["no-new-privileges"],
                log_config=types.LogConfig(type="none"),
                ulimits=[types.Ulimit(name=k, soft=v, hard=v) for k, v in spec.ulimits.items()],
                mounts=[types.Mount(k, str(v), type="bind", read_only=True) for k, v in spec.binds.items()],
                **spec.limits,
            )
            made = client.create_container(
                spec.image,
                entrypoint=[spec.command[0]],
                command=list(spec.command[1:]),
                environment=dict(spec.environment),
                host_config=host,
                labels=dict(spec.labels),
                stdin_open=True,
                user=spec.user,
                working_dir=spec.workdir,
                hostname="machine",
                healthcheck={"test": ["NONE"]} if spec.healthcheck else None,
            )
        return made["Id"]

    def start(self, container: str) -> None:
        """Starts a container that does not run."""
        with self._call("starting a container") as client:
            client.start(container)

    def attach(self, container: str) -> socket.socket:
        """A socket on a running container's standard streams, output in frames."""
        with self._call("attaching to a container") as client:
            made = client.attach_socket(container, params={"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1})
        return getattr(made, "_sock", made)

    def kill(self, container: str) -> None:
        """Ends everything that runs in a container."""
        with self._call("killing a container") as client:
            client.kill(container, signal="KILL")

    def remove(self, container: str) -> None:
        """Ends and removes a container with its unnamed volumes. One that is gone already is no error."""
        for turn in itertools.count():
            try:
                with self._call("removing a container") as client:
                    client.remove_container(container, force=True, v=True)
            except NotThere:
                return
            except EngineError:
                if turn == TRIES:
                    raise
                time.sleep(PAUSE)  # it is ending by itself, and the engine wants to see that first
            else:
                return

    def containers(self, labels: Mapping[str, str]) -> list[dict[str, Any]]:
        """All containers with these labels, running or not, with their ``Id`` and ``Labels``."""
        with self._call("listing containers") as client:
            return client.containers(all=True, filters=_filters(labels))

    def diff(self, container: str) -> frozenset[tuple[str, int]]:
        """The paths at which a container differs from its image, each with the kind of change."""
        with self._call("comparing a container with its image") as client:
            return frozenset((c["Path"], c["Kind"]) for c in client.diff(container) or ())

    # Files

    def stat(self, container: str, path: str) -> Stat:
        """What a path is, the last link not followed. Raises NotThere."""
        with self._call(f"looking at {path}") as client:
            url = f"{client.base_url}/v{client.api_version}/containers/{container}/archive"
            answer = client.head(url, params={"path": os.fsencode(path)}, timeout=self.seconds)
            told = answer.headers.get("X-Docker-Container-Path-Stat")  # Podman has one for a link that leads nowhere
            if answer.status_code == 404 and not told:
                raise NotThere(f"{path} does not exist")
            if not told or not (answer.ok or answer.status_code == 404):
                raise EngineError(f"looking at {path}: the engine answered {answer.status_code}")
        found = json.loads(base64.b64decode(told.translate({ord("-"): "+", ord("_"): "/"})))  # Podman's is the URL kind
        bits = found["mode"]
        mode = bits & 0o777 | sum(unix for go, unix in _SET if bits & go)
        kind = (
            "directory" if bits & _DIRECTORY else "symlink" if bits & _LINK else "other" if bits & _SPECIAL else "file"
        )
        return Stat(kind, mode, found["size"], found.get("linkTarget") or "")

    def get(self, container: str, path: str) -> Iterator[bytes]:
        """The tar of a path, in parts."""
        with self._call(f"reading {path}") as client:
            yield from client.get_archive(container, os.fsencode(path), chunk_size=1 << 20)[0]

    def put(self, container: str, folder: str, tar: Any) -> None:
        """Extracts a tar (bytes or a file) into a folder of the container."""
        with self._call(f"writing to {folder}") as client:
            client.put_archive(container, os.fsencode(folder), tar)

    def export(self, container: str) -> Iterator[bytes]:
        """The tar of all files of a container."""
        with self._call("exporting a container") as client:
            yield from client.export(container, chunk_size=1 << 20)


def _sdk() -> Any:
    try:
        import docker
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f'containers need the Docker SDK: pip install "branchpoint[container]" ({error})'
        ) from error
    return docker


def _errors() -> tuple[type[Exception], ...]:
    import requests

    return _sdk().errors.DockerException, requests.exceptions.RequestException, OSError


def _filters(labels: Mapping[str, str]) -> dict[str, list[str]]:
    return {"label": [f"{k}={v}" if v else k for k, v in labels.items()]} if labels else {}


def _env(entry: str) -> str:
    name, _, value = entry.partition("=")
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$")
    return f'{name}="{escaped}"'


def _text(error: object) -> str:
    """An error as one line; the engine's own explanation where there is one."""
    return " ".join(str(getattr(error, "explanation", None) or error).split())[:500]
