"""Train language agents by reinforcement learning on trees of rollouts."""

__version__ = "0.1.0"
