"""The primitive and the same of `jnp`, for a test's case, and how closely both agree: shared by the tests of
transformations."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jax_bwgemm.facts.contraction import Contraction
from jax_bwgemm.ops.primitive import fused_product
from jax_bwgemm.runtime.config import Config

BF16, F32 = jnp.bfloat16, jnp.float32


def arrays(*shapes, dtype=BF16, seed=0):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def close(got, want, tolerance=2.0**-7):
    """Trees that agree to a rounding or two of bfloat16, relative to the largest element."""
    got_leaves, want_leaves = jax.tree.leaves(got), jax.tree.leaves(want)
    assert len(got_leaves) == len(want_leaves)
    for g, w in zip(got_leaves, want_leaves, strict=True):
        assert (g.shape, g.dtype) == (w.shape, w.dtype)
        g, w = np.asarray(g, np.float64), np.asarray(w, np.float64)
        np.testing.assert_allclose(g, w, atol=tolerance * max(1.0, np.abs(w).max(initial=0.0)), rtol=0)


def contraction(case, a, b):
    """Of the case's operands, (la, m, k) or (la, k, m) and so on; one matrix that a batch shares has no batch mode."""
    shared = [x.shape[0] == 1 < y.shape[0] for x, y in ((a, b), (b, a))]
    modes = ("lmk" if case.a_major == "k" else "lkm", "lkn" if case.b_major == "n" else "lnk")
    return Contraction(*(own[is_shared:] for own, is_shared in zip(modes, shared, strict=True)), "lmn"), shared


def params(case, a, b, **kwargs):
    found, shared = contraction(case, a, b)
    own = {"contraction": found, "out_dtype": jnp.dtype(case.out_dtype), "epilogue": case.epilogue}
    own |= {"tile": None, "precision": None, "out_sharding": None, "settings": Config("ignore")}
    return [x[0] if one else x for x, one in zip((a, b), shared, strict=True)], own | kwargs


def run(case, a, b, bias=None, residual=None):
    own = dataclasses.replace(case, has_bias=bias is not None, has_residual=residual is not None).epilogue
    extras = {"n": bias, "lmn": residual}
    (a, b), given = params(case, a, b, epilogue=own)
    modes = tuple(modes for modes, x in extras.items() if x is not None)
    given["contraction"] = dataclasses.replace(given["contraction"], extras=modes)
    return fused_product(a, b, [x for x in extras.values() if x is not None], **given)[0]


def plain(case, a, b, bias=None, residual=None):
    """The primitive in `jnp`: float32 until the one rounding."""
    a = a if case.a_major == "k" else jnp.swapaxes(a, 1, 2)
    b = b if case.b_major == "n" else jnp.swapaxes(b, 1, 2)
    out = case.alpha * jnp.matmul(a, b, preferred_element_type=F32) + (0 if bias is None else bias.astype(F32))
    out = getattr(jax.nn, case.activation)(out) if case.activation else out
    return (out if residual is None else out + residual.astype(F32)).astype(case.out_dtype)
