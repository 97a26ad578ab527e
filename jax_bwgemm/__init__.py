"""GEMMs for JAX on Hopper and Blackwell GPUs. Imports no compiler, loads no driver and touches no device."""

from jax_bwgemm import checkpoint_policies, export
from jax_bwgemm._version import __version__
from jax_bwgemm.accelerate import AcceleratedProduct, AccelerationReport, accelerate
from jax_bwgemm.autotune import TunedProduct, TuningReport, autotune
from jax_bwgemm.collectives import all_gather_matmul, matmul_reduce_scatter
from jax_bwgemm.dot_general import dot_general
from jax_bwgemm.explain import Explanation, FunctionExplanation, explain
from jax_bwgemm.facts.arch import ARCHS, Arch
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.gated import gated_matmul
from jax_bwgemm.gram import gram, newton_schulz
from jax_bwgemm.install import install, installed, uninstall
from jax_bwgemm.matmul import matmul
from jax_bwgemm.mlp import gated_mlp, mlp
from jax_bwgemm.ops import batching as _batching  # noqa: F401  registers the vmap rules
from jax_bwgemm.ops import derivatives as _derivatives  # noqa: F401  registers how fused products are differentiated
from jax_bwgemm.ops import lowering as _lowering  # noqa: F401  registers the platforms
from jax_bwgemm.runtime.config import FallbackError, FallbackWarning, config
from jax_bwgemm.runtime.record import Stats, stats

__all__ = [
    "ARCHS",
    "AcceleratedProduct",
    "AccelerationReport",
    "Arch",
    "Explanation",
    "FallbackError",
    "FallbackWarning",
    "FunctionExplanation",
    "Stats",
    "Tile",
    "TunedProduct",
    "TuningReport",
    "__version__",
    "accelerate",
    "all_gather_matmul",
    "autotune",
    "checkpoint_policies",
    "config",
    "dot_general",
    "explain",
    "export",
    "gated_matmul",
    "gated_mlp",
    "gram",
    "install",
    "installed",
    "matmul",
    "matmul_reduce_scatter",
    "mlp",
    "newton_schulz",
    "stats",
    "uninstall",
]
