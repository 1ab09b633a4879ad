"""A critic on the policy's trunk: the value of the state before a token, read off the hidden state that predicts it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Critic(nn.Module):
    """A linear head with bias. It starts at zero, so the first values are 0 and nothing about it is random.

    Its loss is ``coefficient`` times half the squared error, and its gradient reaches the trunk. ``lr``: of the head;
    None: the learner's.
    """

    def __init__(self, model: nn.Module, coefficient: float = 0.5, lr: float | None = None) -> None:
        super().__init__()
        config: Any = model.config
        first = next(model.parameters())
        dtype = torch.float64 if first.dtype == torch.float64 else torch.float32
        self.head = nn.Linear(config.get_text_config().hidden_size, 1, device=first.device, dtype=dtype)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.coefficient, self.lr = coefficient, lr

    def forward(self, hidden: Tensor) -> Tensor:
        """[n] values from hidden states [n, H]; never in bfloat16."""
        with torch.autocast(hidden.device.type, enabled=False):
            return self.head(hidden.to(self.head.weight.dtype)).squeeze(-1)


def regression(values: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """The scalar ``sum(w (V - y)^2) / 2``. All arguments [n]."""
    return 0.5 * (weights * (values - targets) ** 2).sum()
