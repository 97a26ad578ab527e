"""Under ten seconds: the package imports, plans, multiplies, differentiates and says what it does."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_bwgemm
from jax_bwgemm.facts.problem import Problem
from jax_bwgemm.planner.plan import plan
from tests import cases

CASE = cases.Case(72, 40, 136)


def test_matmul_and_gradient():
    a, b, _ = CASE.inputs()

    def loss(a, b):
        return jax_bwgemm.matmul(a, b, on_fallback="ignore").astype(jnp.float32).sum()

    got = jax.jit(lambda a, b: jax_bwgemm.matmul(a, b, on_fallback="ignore"))(a[0], b[0])
    cases.check(np.asarray(got)[None], CASE.reference(a, b, None), "bfloat16")
    d_a, d_b = jax.grad(loss, (0, 1))(jnp.asarray(a[0]), jnp.asarray(b[0]))
    cases.check(np.asarray(d_a), np.broadcast_to(b[0].astype(float).sum(1), d_a.shape), "bfloat16")
    cases.check(np.asarray(d_b), np.broadcast_to(a[0].astype(float).sum(0)[:, None], d_b.shape), "bfloat16")


@pytest.mark.parametrize(
    "device, tile", [("h200", "128x256x64_cta1_cluster1x1_streamk"), ("b200", "256x256x64_cta2_cluster2x1")]
)
def test_plan(device, tile):
    problem = Problem(8192, 8192, 8192)
    assert str(plan(problem, jax_bwgemm.ARCHS[device]).tile) == tile
    x = jax.ShapeDtypeStruct((8192, 8192), jnp.bfloat16)
    assert tile in str(jax_bwgemm.explain(x, x, device=device))


def test_says_what_it_does():
    a, b, _ = CASE.inputs()
    with pytest.raises(jax_bwgemm.FallbackError, match="XLA computes 1x40x136"):
        jax_bwgemm.dot_general(a[0, 0], b[0].astype(np.float32), (((0,), (0,)), ((), ())), on_fallback="error")
