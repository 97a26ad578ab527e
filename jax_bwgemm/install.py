"""`install`: whole models run our kernels with no edit, for every product of theirs is a `lax.dot_general`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax

from jax_bwgemm.ops import takeover
from jax_bwgemm.runtime.config import Config, config, current


def install(*, deterministic: str | None = None) -> None:
    """On CUDA devices, every `lax.dot_general` from now on is computed by this package's kernels where they are
    predicted to be faster: what `@`, `jnp.matmul`, `jnp.einsum`, Flax, Equinox and Haiku make, and their gradients.

    Only the lowering changes. The primitive is JAX's, and so are differentiation, vmap, sharding, checkpoint policies
    and cost analysis. Products that no kernel computes, or that XLA is predicted to compute as fast, stay XLA's without
    a word, whatever `on_fallback` says. The defaults of `jax_bwgemm.config` hold. A second call sets `deterministic`.

    What was compiled before is forgotten (`jax.clear_caches`), so that it is compiled anew with our kernels; functions
    that were compiled ahead of time, by `lower(...).compile()`, stay as they are.

    Args:
      deterministic: "run" or "batch", as for `config`: by "batch" every product is a kernel's, and one that stays XLA's
        is reported as `on_fallback` says; None takes it from `config`.

    Raises:
      RuntimeError: this JAX has no rule to fall back on; the message says what to do instead.
      ValueError: another `deterministic`, or a setting that the environment has wrong.

    Example:
      >>> jax_bwgemm.install()
      >>> step = jax.jit(train_step)
    """
    current()  # what the environment says by mistake is an error here, and not where a program is lowered
    if deterministic is not None:
        Config(deterministic=deterministic)  # or its ValueError
    if not takeover.set_everywhere(True, deterministic):
        jax.clear_caches()


def uninstall() -> None:
    """Undoes `install`; `installed` blocks are not touched. What was compiled meanwhile is forgotten."""
    if not takeover.set_everywhere(False):
        jax.clear_caches()


@contextlib.contextmanager
def installed(*, deterministic: str | None = None) -> Iterator[None]:
    """As `install`, for what this thread traces and compiles inside the block; `jax.jit` compiles anew for it.

    Example:
      >>> with jax_bwgemm.installed():
      ...     params = step(params, batch)
    """
    with config(deterministic=deterministic), takeover.block():
        yield
