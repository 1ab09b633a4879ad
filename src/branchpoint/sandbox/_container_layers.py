"""Images of the container sandbox: what an image becomes before machines run on it, and how long each is kept."""

from __future__ import annotations

import itertools
import tarfile
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from branchpoint.sandbox import _container_files as files
from branchpoint.sandbox._container_engine import Base, Engine, EngineError, NotThere
from branchpoint.sandbox._container_owner import LOADED
from branchpoint.sandbox.machine import Image
from branchpoint.world import UserError

Labels = Callable[..., dict[str, str]]
"""Labels of a kind of thing that is made, and more."""


class Layer:
    """An image that machines run on, removed when nothing holds it any more: no machine, frozen machine or child."""

    def __init__(
        self, engine: Engine, base: Base, *, made: bool, parent: Layer | None = None, origin: Layer | None = None
    ) -> None:
        self.id, self.layers = base.id, base.layers
        self.environment = {k: v for k, _, v in (e.partition("=") for e in base.environment)}
        self.healthcheck = base.healthcheck
        self.origin = origin or self
        self.seen: dict[str, Mapping[str, files.Seen]] = {}
        self.seeing = threading.Lock()
        self._lock = threading.Lock()
        self._engine, self._made, self._parent, self._uses = engine, made, parent, 1
        if parent is not None:
            parent.hold()
        if self.origin is not self:
            self.origin.hold()

    def hold(self) -> None:
        with self._lock:
            self._uses += 1

    def release(self) -> None:
        """Gives up one hold. What cannot be removed now is removed when the back-end closes."""
        with self._lock:
            self._uses -= 1
            if self._uses:
                return
        if self._made:
            with suppress(EngineError):
                self._engine.remove_image(self.id)
        for other in (self._parent, None if self.origin is self else self.origin):
            if other is not None:
                other.release()


class Images:
    """Prepared and frozen images of one back-end.

    Args:
        create: creates a container of a layer, for an image, of a kind; returns its id.
        labels: of what is made.
        name: a new name for an image.
        user: numeric ids that trees are given to.
        most: layers of an image.
    """

    def __init__(
        self,
        engine: Engine,
        create: Callable[[Layer, Image, str], str],
        labels: Labels,
        name: Callable[[], str],
        user: tuple[int, int],
        most: int,
    ) -> None:
        self._engine, self._create, self._labels, self._name = engine, create, labels, name
        self._user, self._most = user, most
        self._lock = threading.Lock()
        self._preparing: dict[str, threading.Lock] = {}
        self._prepared: dict[str, Layer] = {}

    def prepare(self, image: Image) -> Layer:
        """The image with its trees in place; made once for the same base and content."""
        missing = [str(p) for p in image.binds.values() if not Path(p).exists()]
        if missing:
            raise UserError(f"image.binds: there is no {missing[0]}")
        places = sorted(image.binds), sorted(image.trees), image.workdir
        key = f"{image.base}\0{places}\0{files.signature(image.trees)}"
        with self._lock:
            lock = self._preparing.setdefault(key, threading.Lock())
        with lock:
            if key not in self._prepared:
                self._prepared[key] = self._build(image)
            return self._prepared[key]

    def _build(self, image: Image) -> Layer:
        base, loaded = self._base(image.base)
        layer = Layer(self._engine, base, made=False)
        container = self._create(layer, Image(base.id, workdir="/"), "preparing")
        try:
            volumes = base.volumes
            if volumes:  # what lies in a volume is in no commit: an image without them takes its place
                stream = self._engine.export(container)
                base = self._import(stream, base.environment)
                self._engine.remove(container)
                layer = Layer(self._engine, base, made=True)
                container = self._create(layer, Image(base.id, workdir="/"), "preparing")
            folders = [*volumes, image.workdir, *image.trees, *(k for k, v in image.binds.items() if Path(v).is_dir())]
            extra = files.folders(self._engine, container, folders, self._user)
            tar, digest = files.pack(image.trees, self._user, extra)
            with tar:
                if not extra and not image.trees and not loaded:
                    return layer
                return self._fill(layer, container, tar, digest, loaded)
        finally:
            self._engine.remove(container)

    def _fill(self, layer: Layer, container: str, tar: Any, digest: str, loaded: str) -> Layer:
        found = f"{layer.id}\0{digest}"
        with self._lock:
            if found in self._prepared:
                return self._prepared[found]
        self._engine.put(container, "/", tar)
        more = {"branchpoint.content": digest} | ({LOADED: loaded} if loaded else {})
        made = self._engine.commit(container, self._labels("prepared", **more), self._name())
        filled = Layer(self._engine, self._engine.base(made), made=True, parent=layer)
        with self._lock:
            self._prepared[found] = filled
        return filled

    def _base(self, name: str) -> tuple[Base, str]:
        """An image, and its id if it was brought in by this call and carries no label."""
        engine, path = self._engine, Path(name)
        if name == "host":
            raise UserError("image.base: 'host' is for the shell sandbox; name an image, or a tar file")
        if not name.endswith(".tar"):
            try:
                return engine.base(name), ""
            except NotThere:
                pass
            try:
                engine.pull(name)
                return engine.base(name), ""
            except EngineError as error:
                raise UserError(
                    f"image.base: no image {name!r} here, and it cannot be pulled ({error}); name one of "
                    "`docker images`, or a .tar file"
                ) from error
        if not path.is_file():
            raise UserError(f"image.base: no file {name}")
        with tarfile.open(path) as tar:
            saved = any(
                m.name.removeprefix("./") in ("manifest.json", "index.json") for m in itertools.islice(tar, 4096)
            )
        if saved:
            known = {i["Id"].removeprefix("sha256:") for i in engine.images({})}
            base = engine.base(engine.load(path))
            return base, "" if base.id.removeprefix("sha256:") in known else base.id
        with path.open("rb") as stream:
            return self._import(iter(lambda: stream.read(1 << 20), b""), ()), ""

    def _import(self, stream: Any, environment: tuple[str, ...]) -> Base:
        return self._engine.base(self._engine.import_(stream, self._labels("prepared"), self._name(), environment))

    def freeze(self, before: Layer, container: str) -> Layer:
        """A layer with the files as of now of a container that ran on ``before``, held by the caller."""
        if before.layers < self._most:
            made = self._engine.commit(container, self._labels("snapshot"), self._name())
            parent = before
        else:
            environment = tuple(f"{k}={v}" for k, v in before.environment.items())
            made = self._engine.import_(
                self._engine.export(container), self._labels("snapshot"), self._name(), environment
            )
            parent = None
        return Layer(self._engine, self._engine.base(made), made=True, parent=parent, origin=before.origin)

    def original(self, layer: Layer, image: Image, under: str) -> Mapping[str, files.Seen]:
        """What the image that a layer began with holds below a folder."""
        origin = layer.origin
        with origin.seeing:
            if under not in origin.seen:
                container = self._create(origin, image, "original")
                try:
                    with files.spool(self._engine.get(container, under), files.COMPARED) as stream:
                        origin.seen[under] = files.index(stream, under)
                except NotThere:
                    origin.seen[under] = {}
                finally:
                    self._engine.remove(container)
            return origin.seen[under]
