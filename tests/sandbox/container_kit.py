"""A real container engine for the tests, with everything it makes in a temporary folder, and a small image.

Needs root, Podman and runc (``make test`` installs them where it may); the tests say why they are skipped where these
cannot be had. ``BRANCHPOINT_TEST_ENGINE`` names the socket of another engine to test instead, e.g. Docker's.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import signal
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from branchpoint.sandbox.container import available

PROGRAMS = """
bash cat chmod cp dd env find grep head id ln ls mkdir mkfifo mknod mount mv nohup ps rm rmdir seq setsid sh sha256sum
sleep sort stat touch tr true unshare wc yes
"""

# Where Podman runs without all of root's rights or beside control groups of two versions, its defaults do not work.
SETTINGS = """
[containers]
netns = "none"
default_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
"""


def rootfs(path: Path, leave_out: tuple[str, ...] = ()) -> Path:
    """A tar of a root file system with this machine's bash and a few programs, and their libraries."""
    with tarfile.open(path, "w") as tar:
        for name in ("usr/bin", "usr/lib", "tmp", "root", "etc", "proc", "sys", "dev", "run"):
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
            tar.addfile(folder)
        for name in ("bin", "lib", "lib64"):
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, "usr/bin" if name == "bin" else "usr/lib"
            tar.addfile(link)
        for name, text in (("etc/passwd", "root:x:0:0:root:/root:/bin/bash\n"), ("etc/group", "root:x:0:\n")):
            _add(tar, name, text.encode(), 0o644)
        libraries: set[str] = set()
        for program in PROGRAMS.split():
            found = shutil.which(program)
            if found is None or program in leave_out:
                continue
            _add(tar, f"usr/bin/{program}", Path(found).read_bytes(), 0o755)
            told = subprocess.run(["ldd", found], capture_output=True, text=True, timeout=10).stdout
            libraries |= set(re.findall(r"(/\S+) \(0x", told))
        for library in sorted(libraries):
            _add(tar, f"usr/lib/{Path(library).name}", Path(library).read_bytes(), 0o755)
    return path


def _add(tar: tarfile.TarFile, name: str, data: bytes, mode: int) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(data), mode
    tar.addfile(entry, io.BytesIO(data))


@contextmanager
def engine() -> Iterator[str]:
    """The socket of a running engine; skips the test that asks for it where there can be none."""
    given = os.environ.get("BRANCHPOINT_TEST_ENGINE")
    if given:
        yield given
        return
    pytest.importorskip("docker", reason='the Docker SDK is not installed: pip install "branchpoint[container]"')
    for program in ("podman", "runc"):
        if shutil.which(program) is None:
            pytest.skip(f"no {program}: apt-get install podman runc")
    if os.getuid() != 0:
        pytest.skip("the tests start Podman as root; name a running engine in BRANCHPOINT_TEST_ENGINE")
    folder = Path(tempfile.mkdtemp(prefix="bp-pod-"))  # short: the address of a socket has 107 bytes
    try:
        yield from _podman(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _podman(folder: Path) -> Iterator[str]:
    (folder / "containers.conf").write_text(SETTINGS)
    environment = os.environ | {"CONTAINERS_CONF": str(folder / "containers.conf"), "TMPDIR": str(folder)}
    podman = ["podman", "--root", f"{folder}/root", "--runroot", f"{folder}/run", "--storage-driver", "overlay"]
    socket = f"unix://{folder}/podman.sock"
    with (folder / "log").open("wb") as log:
        service = subprocess.Popen(
            [*podman, "system", "service", "--time=0", socket], cwd=folder, env=environment, stdout=log, stderr=log
        )
        try:
            why = "not asked"
            for _ in range(100):
                why = available(socket) if (folder / "podman.sock").exists() else "no socket"
                if not why or service.poll() is not None:
                    break
                time.sleep(0.1)
            if why:
                pytest.skip(f"Podman does not serve here: {why}; {(folder / 'log').read_text()[-300:]}")
            yield socket
        finally:
            service.send_signal(signal.SIGTERM)
            try:
                service.wait(10)
            except subprocess.TimeoutExpired:
                service.kill()
                service.wait()
            for last in (["rm", "--all", "--force", "--time", "0"], ["rmi", "--all", "--force"]):
                subprocess.run([*podman, *last], env=environment, capture_output=True, timeout=60)
