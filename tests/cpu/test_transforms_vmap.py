"""vmap of products, along any axes of operands and results, against the same of `jnp`."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from transforms import F32, arrays, close, params, plain, run

import jax_bwgemm
from jax_bwgemm.ops.primitive import product
from tests import cases

pytestmark = pytest.mark.usefixtures("quiet")


AXES = [(0, 0), (1, 2), (2, 1), (0, None), (1, None), (2, None), (None, 0), (None, 1), (None, 2)]


@pytest.mark.parametrize("in_axes", AXES, ids=str)
@pytest.mark.parametrize("majors", cases.MAJORS, ids="".join)
@pytest.mark.parametrize("batches", [(1, 1), (3, 3), (3, 1), (1, 3)], ids=str)
def test_vmap(in_axes, majors, batches):
    """Every way for an axis to meet majors and shared batches."""
    case = cases.Case(8, 24, 16, 3, a_major=majors[0], b_major=majors[1], a_batch=batches[0], b_batch=batches[1])
    v = 2
    operands = []
    for x, axis in zip(case.inputs()[:2], in_axes, strict=True):
        x = np.stack([x, x[..., ::-1]]) if axis is not None else x
        operands.append(jnp.asarray(x if axis is None else np.moveaxis(x, 0, axis)))

    def f(a, b):
        (a, b), given = params(case, a, b)
        return product(a, b, **given)

    got = jax.vmap(f, in_axes)(*operands)

    def pick(x, axis, i):
        return x if axis is None else jnp.take(x, i, axis)

    want = jnp.stack(
        [plain(case, *(pick(x, ax, i) for x, ax in zip(operands, in_axes, strict=True))) for i in range(v)]
    )
    close(got, want)


@pytest.mark.parametrize(
    "in_axes", [(0, None, None), (None, 0, None), (None, None, 0), (0, 0, 0), (1, 2, 1), (0, None, 0)], ids=str
)
@pytest.mark.parametrize("batches", [(1, 1), (3, 3)], ids=str)
def test_vmap_fused(in_axes, batches):
    case = cases.Case(8, 24, 16, 3, a_batch=batches[0], b_batch=batches[1], alpha=0.5, has_bias=True, activation="relu")
    operands = []
    for x, axis in zip(case.inputs(), in_axes, strict=True):
        operands.append(jnp.asarray(x if axis is None else np.moveaxis(np.stack([x, -x]), 0, axis)))
    close(
        jax.vmap(functools.partial(run, case), in_axes)(*operands),
        jax.vmap(functools.partial(plain, case), in_axes)(*operands),
    )


@pytest.mark.parametrize("out_axes", [0, 1, 2, -1])
def test_double_vmap_and_out_axes(out_axes):
    a, b = arrays((2, 3, 8, 16), (2, 16, 24))

    def nest(f):
        return jax.vmap(jax.vmap(f, (0, None)), (0, 0), out_axes)(a, b)

    close(nest(jax_bwgemm.matmul), nest(jnp.matmul))


def test_vmap_of_grad_and_grad_of_vmap():
    a, b = arrays((4, 8, 16), (16, 24))

    def loss(f):
        return lambda a, b: (f(a, b).astype(F32) ** 2).sum()

    def per_example(f):
        return jax.vmap(jax.grad(loss(f), (0, 1)), (0, None))(a, b)

    close(per_example(jax_bwgemm.matmul), per_example(jnp.matmul), 2.0**-6)

    def whole(f):
        return jax.grad(lambda a, b: jax.vmap(loss(f), (0, None))(a, b).sum(), (0, 1))(a, b)

    close(whole(jax_bwgemm.matmul), whole(jnp.matmul), 2.0**-6)
