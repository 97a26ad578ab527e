"""GEMMs for JAX on Hopper and Blackwell GPUs. Imports no compiler, loads no driver and touches no device."""

from jax_bwgemm import batching as _batching  # noqa: F401  registers the vmap rules
from jax_bwgemm import lowering as _lowering  # noqa: F401  registers the platforms
from jax_bwgemm._version import __version__
from jax_bwgemm.arch import ARCHS, Arch
from jax_bwgemm.autotune import TunedProduct, TuningReport, autotune
from jax_bwgemm.config import FallbackError, FallbackWarning, config
from jax_bwgemm.dot_general import dot_general
from jax_bwgemm.explain import Explanation, explain
from jax_bwgemm.matmul import matmul
from jax_bwgemm.tile import Tile

__all__ = [
    "ARCHS",
    "Arch",
    "Explanation",
    "FallbackError",
    "FallbackWarning",
    "Tile",
    "TunedProduct",
    "TuningReport",
    "__version__",
    "autotune",
    "config",
    "dot_general",
    "explain",
    "matmul",
]
