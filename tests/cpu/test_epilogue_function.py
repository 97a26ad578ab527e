"""`matmul(epilogue=)`: a JAX function of the product and operands, fused where kernels have its operations."""

from __future__ import annotations

import functools
import math
import re
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from lowered import BF16, calls, hlo, struct

from jax_bwgemm import FallbackError, FallbackWarning, matmul

F32 = jnp.float32
QUIET: Any = {"on_fallback": "ignore"}


def random(*shape: int, dtype: Any = BF16, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


X, W, BIAS, ROWS, MATRIX = random(24, 16), random(16, 8), random(8), random(24, 1), random(24, 8)
KEY, COMPLEX = jax.random.key(0), jnp.complex64(2 + 1j)
FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "bias": (lambda acc, b: acc + b, (BIAS,)),
    "gate": (lambda acc, b, r: jax.nn.silu(acc + b) * r, (BIAS, MATRIX)),
    "alpha and gelu": (lambda acc: jax.nn.gelu(0.5 * acc), ()),
    "vectors along both": (lambda acc, r, b: acc * r + b, (ROWS, BIAS)),
    "a row": (lambda acc, b: acc + b, (BIAS[None],)),
    "two of a kind": (lambda acc, b, c, r, s: (acc * b + c) * r + s, (BIAS, 2 * BIAS, MATRIX, 2 * MATRIX)),
    "clipped": (lambda acc: jnp.clip(acc, -1, 1), ()),
    "chosen": (lambda acc, r: jnp.where(acc > r, acc, 0.25 * r), (MATRIX,)),
    "written out": (lambda acc: acc / (1 + jnp.exp(-acc)), ()),
    "an operand that is computed": (lambda acc, b: acc * jnp.exp(b - b.mean()), (BIAS,)),
    "a closure": (lambda acc: jax.nn.relu(acc + BIAS), ()),
    "slopes that are constants": (lambda acc: jnp.negative(-acc), ()),
    "a jitted function": (jax.jit(lambda acc, b: jnp.tanh(acc) + b), (BIAS,)),
    "a number of NumPy's": (lambda acc: acc * np.float32(2) + np.asarray(1.0), ()),
    "a mask": (lambda acc, r: jnp.where(r > 0, acc, 0), (MATRIX,)),
    "a scalar that is known": (lambda acc, b: acc * 2.0 + b, (BIAS,)),
    "a concrete scalar": (lambda acc: acc * jnp.asarray(2.0), ()),
    "a scalar that is computed": (lambda acc, b: acc * b.max(), (BIAS,)),
    "random numbers": (lambda acc: acc * jax.random.uniform(KEY, (24, 8)), ()),
    "a random number": (lambda acc: acc * jax.random.uniform(KEY), ()),
    "of a complex number": (lambda acc: acc * COMPLEX.real, ()),
    "numbers on the device": (lambda acc, r, b: acc * jnp.exp(r[0, 0]) + b * r[1, 0] - r[0, 0], (ROWS, BIAS)),
}


def want(f: Any, x: Any, w: Any, *operands: Any) -> jax.Array:
    acc = jnp.matmul(x, w, preferred_element_type=F32)
    return f(acc, *(y.astype(F32) for y in operands)).astype(jnp.result_type(x, w))


def close(got: Any, expected: Any, tolerance: float = 0.01) -> None:
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert (g.shape, g.dtype) == (w.shape, w.dtype)
        atol = tolerance * float(jnp.abs(w).max() + 1e-3)
        np.testing.assert_allclose(np.asarray(g, np.float64), np.asarray(w, np.float64), rtol=0, atol=atol)


def primitives(f: Any, *args: Any) -> str:
    return str(jax.make_jaxpr(f)(*args))


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name: str) -> None:
    """Fused, the same values as JAX's, and its derivative."""
    f, operands = FUNCTIONS[name]

    def ours(x: Any, w: Any, *operands: Any) -> jax.Array:
        return matmul(x, w, epilogue=f, operands=operands)

    args = X, W, *operands
    text = primitives(ours, *args)
    assert "bwgemm_" in text and not re.search(r"\[24,8\] = (add|mul|max|div|tanh)", text)
    close(ours(*args), want(f, *args))
    close(jax.jit(ours)(*args), want(f, *args))
    wide = tuple(x.astype(F32) for x in args)

    def gradient(g: Any) -> Any:
        return jax.grad(lambda *x: (g(*x).astype(F32) * MATRIX.astype(F32)).sum(), tuple(range(len(args))))

    close(gradient(ours)(*wide), gradient(lambda *x: want(f, *x))(*wide), 1e-4)
    axes = (0, *[None] * (len(args) - 1))
    close(jax.vmap(ours, axes)(jnp.stack([X, 2 * X]), *args[1:]), jnp.stack([ours(x, *args[1:]) for x in (X, 2 * X)]))
    tangents = tuple(jnp.ones_like(x) for x in wide)
    close(jax.jvp(ours, wide, tangents)[1], jax.jvp(lambda *x: want(f, *x), wide, tangents)[1], 1e-4)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(
    "a, b", [((16,), (16, 8)), ((2, 3, 4, 16), (16, 8)), ((3, 4, 16), (2, 3, 16, 8)), ((4, 16), (16,))]
)
def test_shapes(a: Any, b: Any) -> None:
    x, w = random(*a), random(*b)
    r = random(*jnp.matmul(x, w).shape)

    def f(acc: Any, r: Any) -> Any:
        return jax.nn.relu(acc) * r

    close(matmul(x, w, epilogue=f, operands=(r,)), want(f, x, w, r))


@pytest.mark.usefixtures("quiet")
def test_masks_and_numbers() -> None:
    """Of bool, and scalars that are no tracers."""
    mask = MATRIX > 0

    def f(acc: Any, keep: Any, scale: Any) -> Any:
        return jnp.where(keep, acc * scale, 0.0)

    def g(acc: Any, keep: Any) -> Any:
        return acc * keep

    text = primitives(lambda x, w, m: matmul(x, w, epilogue=f, operands=(m, 2.0)), X, W, mask)
    assert "bwgemm_fused_matmul" in text and "select_n" not in text
    acc = jnp.matmul(X, W, preferred_element_type=F32)
    close(matmul(X, W, epilogue=f, operands=(mask, jnp.asarray(2.0))), f(acc, mask, 2.0).astype(BF16))
    close(matmul(X, W, epilogue=g, operands=(mask,)), g(acc, mask).astype(BF16))


@pytest.mark.usefixtures("quiet")
def test_zeros_of_either_sign() -> None:
    """Are two constants, to whoever keeps what was compiled for one."""
    for zero in (0.0, -0.0, 0.0):
        got = matmul(X, W, epilogue=lambda acc, zero=zero: 1 / jnp.where(acc > 1e9, acc, zero))
        assert (got == (jnp.inf if math.copysign(1, zero) > 0 else -jnp.inf)).all()


def test_scalars_that_were_computed_share_a_program() -> None:
    """A number of Python's or NumPy's is a part of the function; an array's value is read when the kernel runs."""

    def epilogue(scale: Any) -> Any:
        f = functools.partial(matmul, epilogue=lambda acc, s: jax.nn.relu(acc) * s, operands=(scale,), **QUIET)
        (found,) = [eqn.params["epilogue"] for eqn in jax.make_jaxpr(f)(X, W).eqns if "epilogue" in eqn.params]
        return found

    one, other, known, known_other = map(epilogue, (jnp.asarray(2.5), jnp.asarray(3.5), 2.5, np.float32(3.5)))
    assert one == other != known != known_other


@pytest.mark.usefixtures("quiet")
def test_dtypes() -> None:
    f, operands = FUNCTIONS["gate"]
    got = matmul(X, W, epilogue=f, operands=operands, out_dtype=F32)
    assert got.dtype == F32
    close(got, f(jnp.matmul(X, W, preferred_element_type=F32), *(x.astype(F32) for x in operands)), 1e-5)
    wide = [x.astype(F32) for x in (X, W, *operands)]
    close(matmul(*wide[:2], epilogue=f, operands=wide[2:]), want(f, *wide), 1e-5)
    with jax.enable_x64(True):
        wide = [x.astype(jnp.float64) for x in (X, W, *operands)]
        got = matmul(*wide[:2], epilogue=f, operands=wide[2:])
        close(got, f(wide[0] @ wide[1], *wide[2:]), 1e-14)


@pytest.mark.usefixtures("layers_on_h200")
def test_kernels() -> None:
    """The chains of `matmul` are instances; what takes an expression of its own has one, or XLA has it aloud."""
    x, w, b, r = struct(4096, 1024), struct(1024, 4096), struct(4096), struct(4096, 4096)

    def variant(f: Any, *operands: Any) -> str:
        (call,) = calls(hlo(lambda x, w, *o: matmul(x, w, epilogue=f, operands=o), x, w, *operands))
        return call["variant"]

    assert variant(lambda acc, b: jax.nn.gelu(acc + b), b).endswith("_bias_gelu")
    assert variant(lambda acc, b, r: r + jax.nn.silu(acc + b), b, r).endswith("_bias_silu_residual")
    assert variant(lambda acc: acc).endswith("_identity")
    with pytest.raises(FallbackError, match="no cubin"):
        variant(lambda acc, b, r: jnp.exp(acc + b) - r, b, r)


REFUSED = {
    "softmax": (lambda acc: jax.nn.softmax(acc), "pointwise in the sums, got `reduce_max`: apply that to the result"),
    "cumsum": (lambda acc: jnp.cumsum(acc, 0), "got `cumsum`"),
    "transpose": (lambda acc: acc.T.T, "got `transpose`"),
    "slice": (lambda acc: acc[::-1], "got `rev`"),
    "product": (lambda acc: acc @ acc.T @ acc, "got `(transpose|dot_general)`"),
    "shape": (lambda acc: acc[:, :2], "got `slice`"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_pointwise(name: str) -> None:
    f, message = REFUSED[name]
    with pytest.raises(ValueError, match=f"`epilogue` requires a function that .*{message}"):
        matmul(X, W, epilogue=f)


@jax.custom_jvp
def own(x: jax.Array) -> jax.Array:
    return jnp.tanh(x)


own.defjvp(lambda primals, tangents: (jnp.tanh(primals[0]), tangents[0]))
ALOUD = {
    "a mask of what kernels lack": (
        lambda acc, m: jnp.where(~m, jnp.cos(acc), 0),
        (MATRIX > 0,),
        "`cos` is no operation",
    ),
    "straight through": (
        lambda acc: acc + jax.lax.stop_gradient(jnp.round(acc) - acc),
        (),
        "`(round|stop_gradient)` is no",
    ),
    "rematerialized": (jax.checkpoint(lambda acc: jax.nn.silu(acc)), (), "`(remat2|checkpoint)` is no operation"),
    "an inverse": (lambda acc: jnp.arctan(acc) + jnp.arcsinh(acc), (), "`(atan|asinh)` is no operation"),
    "fewer digits": (lambda acc: jax.lax.reduce_precision(acc, 8, 7), (), "`reduce_precision` is no operation"),
    "no number": (lambda acc: jnp.where(acc > 1e9, jnp.nan, acc), (), r"a constant that is no number \(nan\) is none"),
    "a comparison as a number": (lambda acc: acc * (acc != 0), (), "a comparison's result as a number is no operation"),
    "sine": (lambda acc: jnp.sin(acc), (), "`sin` is no operation of an epilogue"),
    "a derivative of its own": (lambda acc: own(acc), (), r"a function with a derivative of its own \(`custom_jvp`\)"),
    "a constant": (lambda acc: jnp.ones_like(acc), (), "it does not read the sums"),
}


@pytest.mark.parametrize("name", ALOUD)
def test_what_xla_computes_is_said(name: str) -> None:
    """With the same result, from the float32 product."""
    f, operands, reason = ALOUD[name]
    with pytest.raises(FallbackError, match=f"the epilogue <lambda> of a product of bfloat16.24, 8.: {reason}"):
        matmul(X, W, epilogue=f, operands=operands, on_fallback="error")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        got = matmul(X, W, epilogue=f, operands=operands, on_fallback="warn")
    said = [str(warning.message) for warning in found if warning.category is FallbackWarning]
    assert sum(re.search(reason, text) is not None for text in said) == 1
    acc = jnp.matmul(X, W, preferred_element_type=F32)
    close(got, f(acc, *(x if x.dtype == bool else x.astype(F32) for x in operands)).astype(BF16))


@pytest.mark.usefixtures("quiet")
def test_a_derivative_of_its_own_stays() -> None:
    got = jax.grad(lambda x: matmul(x, W.astype(F32), epilogue=own).sum())(X.astype(F32))
    close(got, jnp.broadcast_to(W.astype(F32).sum(1), X.shape), 1e-5)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_sharded(axis_type: AxisType) -> None:
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(axis_type,) * 2)
    f, operands = FUNCTIONS["gate"]
    args, specs = (X, W, *operands), (P("x"), P(None, "y"), P("y"), P("x", "y"))
    with jax.set_mesh(mesh):
        own = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(args, specs, strict=True)]
        got = jax.jit(lambda x, w, *o: matmul(x, w, epilogue=f, operands=o))(*own)
        assert got.sharding.spec == P("x", "y")
    close(np.asarray(got), np.asarray(want(f, *args)))


@pytest.mark.usefixtures("quiet")
def test_in_a_shard_map() -> None:
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    f, operands = FUNCTIONS["gate"]

    def ours(x: Any, w: Any, *o: Any) -> Any:
        return matmul(x, w, epilogue=f, operands=o)

    specs = P("x"), P(), P(), P("x")
    args = X, W, *operands
    got = jax.jit(jax.shard_map(ours, mesh=mesh, in_specs=specs, out_specs=P("x")))(*args)
    close(np.asarray(got), np.asarray(want(f, *args)))


def test_bad_arguments() -> None:
    def f(acc: Any, *rest: Any) -> Any:
        return acc

    alone = "`operands` requires an `epilogue`, and that no `alpha`, `bias`, `activation` or `residual` beside it"
    for given in ({"operands": (BIAS,)}, {"epilogue": f, "bias": BIAS}, {"epilogue": f, "alpha": 2.0}):
        with pytest.raises(ValueError, match=alone):
            matmul(X, W, **given)
    with pytest.raises(TypeError, match="`epilogue` requires a function of the sums and the operands, got str"):
        matmul(X, W, epilogue="relu")
    with pytest.raises(ValueError, match=r"`operands\[1\]` requires a shape that broadcasts .* \(24, 8\), got \(3,\)"):
        matmul(X, W, epilogue=f, operands=(BIAS, jnp.ones(3)))
    with pytest.raises(ValueError, match=r"`operands\[0\]` requires a shape .* got \(2, 24, 8\)"):
        matmul(X, W, epilogue=f, operands=(jnp.ones((2, 24, 8)),))
    with pytest.raises(TypeError, match=r"`operands\[0\]` requires an array, got list"):
        matmul(X, W, epilogue=f, operands=([1.0],))
    for said in (lambda acc: jax.debug.print("here"), lambda acc: jax.debug.print("{}", acc.sum())):
        with pytest.raises(ValueError, match=r"`epilogue` requires a function without effects, got `debug_\w+`"):
            matmul(X, W, epilogue=lambda acc, said=said: (said(acc), acc)[1])
    with pytest.raises(ValueError, match=r"`operands\[0\]` requires a number that float32 has, got one of 1329 bits"):
        matmul(X, W, epilogue=lambda acc, s: acc * s, operands=(10**400,))
    close(matmul(X, W, epilogue=lambda acc, s: acc * s, operands=(2**40,), **QUIET), 2.0**40 * matmul(X, W, **QUIET))
    with pytest.raises(ValueError, match="`epilogue` requires a floating `out_dtype`, got int32"):
        matmul(X.astype(jnp.int8), W.astype(jnp.int8), epilogue=f, out_dtype=jnp.int32)
