"""PyTorch and numpy, imported at first use, so that a command can refuse wrong input without loading them.

Use `Tensor` in annotations only. Type checkers see the class; at run time it is Any.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flowgrpo.schema.imports.lazy import lazy

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor
else:
    np = lazy("numpy")
    torch = lazy("torch")
    Tensor = Any

__all__ = ["Tensor", "np", "torch"]
