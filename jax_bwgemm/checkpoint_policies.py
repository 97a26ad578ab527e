"""Policies for `jax.checkpoint` that count this package's products among the dots.

JAX's own know `lax.dot_general` alone and have every product of another primitive computed again.

Under `install` the products are JAX's, and JAX's policies will do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from jax_bwgemm.ops.primitive import fused_matmul_p, matmul_p


def dots_saveable(primitive: Any, *avals: Any, **params: Any) -> Any:
    """As `jax.checkpoint_policies.dots_saveable`: results of products are kept, all else is computed again.

    Of a fused product (a bias, an activation) that is differentiated, what is kept is what its derivative needs.

    Example:
      >>> layer = jax.checkpoint(layer, policy=jax_bwgemm.checkpoint_policies.dots_saveable)
    """
    if primitive in (matmul_p, fused_matmul_p):
        return True
    return jax.checkpoint_policies.dots_saveable(primitive, *avals, **params)


def dots_with_no_batch_dims_saveable(primitive: Any, *avals: Any, **params: Any) -> Any:
    """As `jax.checkpoint_policies.dots_with_no_batch_dims_saveable`: products with weights are kept; those of a batch
    of pairs, as attention's are, are computed again."""
    if primitive in (matmul_p, fused_matmul_p):
        return not params["contraction"].batch
    return jax.checkpoint_policies.dots_with_no_batch_dims_saveable(primitive, *avals, **params)


def offload_dot_with_no_batch_dims(offload_src: str, offload_dst: str) -> Callable[..., Any]:
    """As `jax.checkpoint_policies.offload_dot_with_no_batch_dims`: products with weights are kept in another memory, as
    from "device" in "pinned_host", and all else is computed again.

    Example:
      >>> policy = jax_bwgemm.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")
      >>> layer = jax.checkpoint(layer, policy=policy)
    """
    theirs = jax.checkpoint_policies.offload_dot_with_no_batch_dims(offload_src, offload_dst)

    def policy(primitive: Any, *avals: Any, **params: Any) -> Any:
        if primitive in (matmul_p, fused_matmul_p):  # as the `lax.dot_general` that it stands for
            numbers = params["contraction"].product.dimension_numbers()
            return theirs(lax.dot_general_p, *avals, dimension_numbers=numbers)
        return theirs(primitive, *avals, **params)

    return policy
