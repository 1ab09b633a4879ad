"""Small processes for exact enumeration."""

from __future__ import annotations

from typing import Any

import numpy as np

from branchpoint.probe.oracles import shipped
from branchpoint.probe.tabular import Mdp

ORACLES = shipped()


def known(name: str) -> Mdp:
    return Mdp.parse(ORACLES["mdps"][name], name)


def random_mdp(seed: int, depth: int) -> Mdp:
    """Two states a step, two actions, chance, rewards on the way, early ends, sometimes shared logits."""
    rng = np.random.default_rng(seed)
    trans: list[Any] = []
    for t in range(depth):
        for _ in range(1 if t == 0 else 2):
            trans.append([_outcomes(rng, t, depth) for _ in range(2)])
    pi = [tuple(p) for p in rng.dirichlet([2.0, 2.0], size=len(trans))]
    block = list(range(len(trans)))
    if seed % 3 == 0:
        block[-1] = block[-2]
        pi[-1] = pi[-2]
    return Mdp.parse({"trans": trans, "pi": pi, "block": block, "s0": 0}, f"random {seed}")


def _outcomes(rng: np.random.Generator, t: int, depth: int) -> list[list[float]]:
    def after() -> int:
        ends = t == depth - 1 or (t > 0 and rng.random() < 0.2)
        return -1 if ends else 1 + 2 * t + int(rng.integers(2))

    reward = float(rng.normal())
    if rng.random() < 0.25:
        p = float(rng.uniform(0.2, 0.8))
        return [[p, reward, after()], [1 - p, float(rng.normal()), after()]]
    return [[1.0, reward, after()]]


def noisy_two_step() -> Mdp:
    """The two-step counterexample with reward 1 for A and 0.5 for the second action 0; all probabilities 1/2."""
    trans = [
        [[[1.0, 0.0, 1]], [[1.0, 0.0, 2]]],
        [[[1.0, 1.5, -1]], [[1.0, 1.0, -1]]],
        [[[1.0, 0.5, -1]], [[1.0, 0.0, -1]]],
    ]
    return Mdp.parse({"trans": trans, "pi": [[0.5, 0.5]] * 3, "block": [0, 1, 2], "s0": 0}, "noisy")


def two_token_turns() -> Mdp:
    """Three turns of two tokens each: a step is a token, and rewards come at the end of a turn."""
    trans = [
        [[[1.0, 0.0, 1]], [[1.0, 0.0, 2]]],
        [[[1.0, 0.3, 3]], [[0.6, -0.2, 4], [0.4, 1.0, -1]]],
        [[[1.0, 0.0, 4]], [[1.0, 0.9, 3]]],
        [[[1.0, 0.0, 5]], [[1.0, 0.0, 6]]],
        [[[1.0, 0.0, 6]], [[1.0, 0.0, 5]]],
        [[[0.5, 1.0, -1], [0.5, 0.0, -1]], [[1.0, 0.4, -1]]],
        [[[1.0, -1.0, -1]], [[1.0, 2.0, -1]]],
    ]
    pi = [[0.6, 0.4], [0.3, 0.7], [0.5, 0.5], [0.8, 0.2], [0.45, 0.55], [0.35, 0.65], [0.9, 0.1]]
    return Mdp.parse({"trans": trans, "pi": pi, "block": list(range(7)), "s0": 0}, "two tokens")
