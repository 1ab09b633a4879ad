"""Event-keyed randomness: the luck of the world.

A draw depends on *what happens* (a key such as tool, resource, repeat count), never on the order of calls and never on
free text. Two branches that hold the same seed meet the same fate for the same event (common random numbers); two
branches with different seeds meet independent fates of the same distribution.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from operator import index
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # imported where it is drawn from: a process without numpy forks three times as fast
    import numpy as np

Arm = Literal["clean", "paired", "independent"]
Pairing = Literal["clean", "paired", "independent", "blocked"]
"""How a run's groups meet the world's luck: all in one arm, or ``blocked``: half of them clean, half independent."""
Key = str | int | bytes | None


def arm_of(pairing: Pairing, update: int, place: int) -> Arm:
    """The arm of one group of an update. Blocked groups alternate, and so does each place from update to update."""
    if pairing != "blocked":
        return pairing
    return "clean" if (update + place) % 2 == 0 else "independent"


def digest(seed: int, *key: Key) -> int:
    """A 128-bit integer from a seed and a key. Equal keys give equal integers on every machine and run.

    Each part is written with its type and length, so ``("a", "b")``, ``("ab",)`` and ``(1,)``, ``("1",)`` all differ.
    """
    h = hashlib.blake2b(digest_size=16)
    for part in (seed, *key):
        if not isinstance(part, str | int | bytes | None):
            try:
                part = index(part)  # numpy integers
            except TypeError:
                raise TypeError(
                    f"an event key holds str, int, bytes or None, not {type(part).__name__}: {part!r}"
                ) from None
        raw = part if isinstance(part, bytes) else str(part).encode()
        h.update(f"{type(part).__name__}:{len(raw)}:".encode())
        h.update(raw)
    return int.from_bytes(h.digest(), "little")


@dataclass(frozen=True, slots=True)
class Noise:
    """A stateless keyed generator.

    ``seed`` keys the luck of the world. ``own`` keys everything that must never be shared between branches (reseeding a
    restored environment's generators). ``clean`` switches chance events off: :meth:`happens` is then always False.
    """

    seed: int = 0
    own: int = 0
    clean: bool = False

    def at(self, *event: Key) -> np.random.Generator:
        """The generator of one event: Philox keyed by a hash of the seed and the event."""
        import numpy as np

        return np.random.Generator(np.random.Philox(key=digest(self.seed, *event)))

    def private(self, *event: Key) -> np.random.Generator:
        """As :meth:`at`, keyed by ``own``: independent between branches whatever the arm."""
        import numpy as np

        return np.random.Generator(np.random.Philox(key=digest(self.own, "own", *event)))

    def happens(self, probability: float, *event: Key) -> bool:
        """Whether a chance event of this probability happens: equal for equal events, never in the clean arm."""
        return not self.clean and self.at(*event).random() < probability

    def child(self, *key: Key) -> Noise:
        """The noise one level down in the tree of seeds (run, step, task, branch, turn)."""
        return Noise(digest(self.seed, "child", *key), digest(self.own, "child", *key), self.clean)

    def branch(self, arm: Arm, *key: Key) -> Noise:
        """The luck of one branch: shared when ``paired``, its own when ``independent``, none when ``clean``.

        Both of the first two have the same marginal law: any single branch sees draws from the same distribution.
        """
        mine = self.child("branch", *key)
        seed = mine.seed if arm == "independent" else self.seed
        return Noise(seed, mine.own, self.clean or arm == "clean")
