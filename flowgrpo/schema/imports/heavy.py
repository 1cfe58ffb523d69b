"""PyTorch and numpy, imported lazily: a command that refuses its input need not load them.

`Tensor` is for annotations, which are strings: type checkers see the class, a running program sees Any.
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
