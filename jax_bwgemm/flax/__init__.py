"""Flax layers whose bias, activation and residual are part of the product's kernel: `jax_bwgemm.flax.linen` and `.nnx`.

They are Flax's own classes: parameters, initialisers, dtypes and metadata are made by Flax's code, so that checkpoints
load both ways. `replace` has the layers of an existing model do the same. The defaults of `jax_bwgemm.config` hold.
"""

from __future__ import annotations

try:
    import flax as _flax  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "`jax_bwgemm.flax` requires Flax, which is not installed: pip install 'jax_bwgemm[flax]'", name=error.name
    ) from None

from jax_bwgemm.flax import linen, nnx
from jax_bwgemm.flax.replacing import Replaced, replace

__all__ = ["Replaced", "linen", "nnx", "replace"]
