"""What several tests of autograd begin with."""

from __future__ import annotations

import torch
from torch import Tensor


def leaf(*values: float) -> Tensor:
    """A vector in float64 that takes a gradient."""
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)
