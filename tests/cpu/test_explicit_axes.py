"""Products over explicit mesh axes: their types, their collectives and what is refused, against the same of `jnp`
(tests/cpu/test_partition.py says how that is seen here)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, reshard
from jax.sharding import PartitionSpec as P
from meshed import BF16, F32, H200, arrays, compiled, grad, mesh_of

import jax_bwgemm
from jax_bwgemm.ops import lowering

A, B = (64, 32), (32, 48)
ours = functools.partial(jax_bwgemm.matmul, **H200)
silu = jax.nn.silu


@pytest.fixture(autouse=True)
def _cuda_rule(artifacts_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On this CPU, planned for an H200."""
    monkeypatch.setattr(lowering, "platforms_of", lambda ctx: ["cuda"])


def placed(shapes: Sequence[tuple[int, ...]], specs: Sequence[P]) -> list[jax.Array]:
    return [jax.device_put(x, spec) for x, spec in zip(arrays(*shapes), specs, strict=True)]


def check(got: Any, want: Any) -> None:
    """The same types, with their shardings, and values to a few roundings."""
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert jax.typeof(x) == jax.typeof(y)
        x, y = (np.asarray(z, F32) for z in (x, y))
        np.testing.assert_allclose(x, y, rtol=2.0**-5, atol=2.0**-5 * np.abs(y).max())


def jvp(f: Callable[..., Any], num: int) -> Callable[..., Any]:
    """In the first operand alone: a term of the result's tangent, of which others are zero."""
    return lambda x, *rest: jax.jvp(lambda x: f(x, *rest), (x,), (x,))


def one(f: Callable[..., Any], num: int) -> Callable[..., Any]:
    return f


def mlp(x: jax.Array, w: jax.Array, v: jax.Array, *added: jax.Array) -> jax.Array:
    bias_in, bias_out, residual = added or (None, None, None)
    return jax_bwgemm.mlp(x, w, v, bias_in=bias_in, bias_out=bias_out, residual=residual, activation="relu", **H200)


def plain_mlp(x: jax.Array, w: jax.Array, v: jax.Array, *added: jax.Array) -> jax.Array:
    bias_in, bias_out, residual = added or (jnp.zeros((), BF16),) * 3
    return jax.nn.relu(x @ w + bias_in) @ v + bias_out + residual


def gated(x: jax.Array, w: jax.Array, v: jax.Array, *biases: jax.Array) -> jax.Array:
    bias_gate, bias_up = biases or (None, None)
    return jax_bwgemm.gated_matmul(x, w, v, bias_gate=bias_gate, bias_up=bias_up, **H200)


def plain_gated(x: jax.Array, w: jax.Array, v: jax.Array, *biases: jax.Array) -> jax.Array:
    bias_gate, bias_up = biases or (0, 0)
    return silu(x @ w + bias_gate) * (x @ v + bias_up)


def gated_mlp(x: jax.Array, w: jax.Array, u: jax.Array, v: jax.Array, *added: jax.Array) -> jax.Array:
    (residual,) = added or (None,)
    return jax_bwgemm.gated_mlp(x, w, u, v, residual=residual, **H200)


def plain_gated_mlp(x: jax.Array, w: jax.Array, u: jax.Array, v: jax.Array, *added: jax.Array) -> jax.Array:
    out = plain_gated(x, w, u) @ v
    return out + added[0] if added else out


MIXED: dict[str, tuple[Any, Any, Sequence[tuple[int, ...]], Sequence[P]]] = {
    "m": (ours, jnp.matmul, (A, B), (P("x"), P())),
    "n": (ours, jnp.matmul, (A, B), (P(), P(None, "x"))),
    "k": (*(functools.partial(f, out_sharding=P("x")) for f in (ours, jnp.matmul)), (A, B), (P(None, "x"), P("x"))),
    "gated": (gated, plain_gated, (A, B, B), (P("x"), P(), P())),
    "mlp": (mlp, plain_mlp, (A, B, B[::-1]), (P("x"), P(), P())),
    "gated mlp": (gated_mlp, plain_gated_mlp, (A, B, B, B[::-1]), (P("x"), P(), P(), P())),
}


@pytest.mark.parametrize("name", MIXED)
@pytest.mark.parametrize("of", [one, grad], ids=["forward", "gradient"])
def test_explicit_and_automatic_axes_of_one_mesh(name: str, of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """For our rule and for the fallback."""
    f, theirs, shapes, specs = MIXED[name]
    with jax.set_mesh(jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Explicit, AxisType.Auto))):
        operands = placed(shapes, specs)
        assert "CustomSPMDPartitioning" in jax.jit(of(f, len(shapes))).lower(*operands).as_text()
        want = jax.jit(of(theirs, len(shapes)))(*operands)
        check(compiled(of(f, len(shapes)), operands)[0], want)
        monkeypatch.setattr(lowering, "platforms_of", lambda ctx: ["cpu"])
        with jax_bwgemm.config(on_fallback="ignore"):
            check(jax.jit(of(f, len(shapes)))(*operands), want)


def test_install_over_explicit_and_automatic_axes() -> None:
    with jax.set_mesh(jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Explicit, AxisType.Auto))):
        x, w = placed((A, B), (P("x"), P()))
        want = jax.jit(grad(jnp.matmul))(x, w)
        with jax_bwgemm.installed():
            check(jax.jit(grad(jnp.matmul))(x, w), want)


def fused(activation: str | None) -> Any:
    def f(a: jax.Array, b: jax.Array, bias: jax.Array, residual: jax.Array) -> jax.Array:
        return ours(a, b, bias=bias, residual=residual, activation=activation)

    def theirs(a: jax.Array, b: jax.Array, bias: jax.Array, residual: jax.Array) -> jax.Array:
        out = a @ b + bias
        return (getattr(jax.nn, activation)(out) if activation else out) + residual

    return f, theirs


def function(acc: jax.Array, scale: jax.Array, bias: jax.Array, factor: jax.Array) -> jax.Array:
    return silu(acc * scale + bias) * factor


def with_function(a: jax.Array, b: jax.Array, *operands: jax.Array) -> jax.Array:
    found: jax.Array = ours(a, b, epilogue=function, operands=operands)
    return found


EXTRAS = (A, B, (48,), (64, 48))
BLOCK = (A, B, B[::-1], (48,), (32,), A)
JOINED: dict[str, tuple[Any, Sequence[tuple[int, ...]], Sequence[P]]] = {
    "rows of a residual": (fused(None), EXTRAS, (P(), P(), P(), P("x"))),
    "columns of a residual": (fused("relu"), EXTRAS, (P("x"), P(), P(), P(None, "y"))),
    "both of a residual": (fused("silu"), EXTRAS, (P(), P(), P(), P("x", "y"))),
    "a whole residual": (fused("silu"), EXTRAS, (P("x"), P(None, "y"), P(), P())),
    "a bias": (fused("silu"), EXTRAS, (P("x"), P(), P("y"), P())),
    "a bias alone": (fused("relu"), EXTRAS, (P(), P(), P("x"), P())),
    "a bias and a residual": (fused(None), EXTRAS, (P(), P(), P("y"), P("x"))),
    "a function": (
        (with_function, lambda a, b, *x: function(a @ b, *x).astype(BF16)),
        (A, B, (), (48,), (64, 48)),
        (P("x"), P(), P(), P("y"), P()),
    ),
    "the other weight": ((gated, plain_gated), (A, B, B, (48,), (48,)), (P("x"), P(), P(None, "y"), P(), P())),
    "the other bias": ((gated, plain_gated), (A, B, B, (48,), (48,)), (P("x"), P(), P(), P(), P("y"))),
    "mlp, a whole residual": ((mlp, plain_mlp), BLOCK, (P("x"), P(), P(), P(), P(), P())),
    "mlp, rows of a residual": ((mlp, plain_mlp), BLOCK, (P(), P(), P(), P(), P(), P("x"))),
    "mlp, both biases": ((mlp, plain_mlp), BLOCK, (P("x"), P(), P(), P("y"), P("y"), P())),
    "gated mlp, a whole residual": (
        (gated_mlp, plain_gated_mlp), (A, B, B, B[::-1], A), (P("x"), P(), P(), P(), P(None, "y")),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", JOINED)
@pytest.mark.parametrize("of", [one, jvp, grad], ids=["forward", "tangent", "gradient"])
def test_what_is_added_shards_the_result(name: str, of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in jnp's sum, of our rule and of the fallback; tangents and cotangents have jnp's types, too."""
    (f, theirs), shapes, specs = JOINED[name]
    num = len(shapes)
    with jax.set_mesh(mesh_of(AxisType.Explicit)):
        operands = placed(shapes, specs)
        got, found = compiled(of(f, num), operands)
        want, their_collectives = compiled(of(theirs, num), operands)
        check(got, want)
        if of is one and name != "mlp, both biases":  # whose sum one operand of the last product has sharded alone
            assert found == their_collectives == []
        if of is one:
            monkeypatch.setattr(lowering, "platforms_of", lambda ctx: ["cpu"])
            check(jax.jit(of(f, num))(*operands), want)


def test_a_residual_under_vmap() -> None:
    shapes, specs = ((4, *A), B, (4, 64, 48)), (P(), P(), P(None, "x"))
    with jax.set_mesh(mesh_of(AxisType.Explicit)):
        operands = placed(shapes, specs)
        f = jax.vmap(lambda a, b, r: ours(a, b, residual=r, activation="relu"), (0, None, 0))
        theirs = jax.vmap(lambda a, b, r: jax.nn.relu(a @ b) + r, (0, None, 0))
        for of in (one, grad):
            check(compiled(of(f, 3), operands)[0], compiled(of(theirs, 3), operands)[0])


@pytest.mark.parametrize("residual", [P(), P("x"), P(None, "x")], ids=str)
def test_a_residual_is_moved_to_the_sharding_that_is_said(residual: P) -> None:
    with jax.set_mesh(mesh_of(AxisType.Explicit)):
        operands = placed((A, B, (64, 48)), (P(None, "x"), P("x"), residual))
        of = {"out_sharding": P("x", None)}
        got, _ = compiled(grad(lambda a, b, r: ours(a, b, residual=r, **of), 3), operands)

        def plain(a: jax.Array, b: jax.Array, r: jax.Array) -> jax.Array:
            return jnp.matmul(a, b, **of) + reshard(r, P("x", None))

        check(got, jax.jit(grad(plain, 3))(*operands))


@pytest.mark.parametrize("specs", [(P("x"), P(), P("x"), P()), (P("x"), P(), P(), P("y")), (P(), P(), P("x"), P("x"))])
def test_what_is_added_and_contradicts_is_refused_as_jnp_refuses_it(specs: Sequence[P]) -> None:
    with jax.set_mesh(mesh_of(AxisType.Explicit)):
        operands, errors = placed(EXTRAS, specs), []
        for f in fused(None):
            with pytest.raises(Exception, match="add (got incompatible|operation with inputs)") as error:
                jax.jit(f)(*operands)
            errors.append(type(error.value))
    assert errors[0] is errors[1]


def test_sums_that_are_put_off_are_refused() -> None:
    """Of an operand, of what is added, and of the result: a sentence, with and without a gradient."""
    said = P(None, None, unreduced={"x"})
    with jax.set_mesh(mesh_of(AxisType.Explicit)):
        a, b, x, w = placed((A, B, A, B), (P(None, "x"), P("x"), P("x"), P()))
        own = "`out_sharding` requires a spec without `unreduced` and `reduced` axes, got P.None, None, unreduced="
        for f in (jax_bwgemm.matmul, functools.partial(jax_bwgemm.gated_matmul, w_up=b)):
            with pytest.raises(ValueError, match=f"{own}.*: leave the product to `jnp.matmul` or `lax.dot_general`"):
                jax.jit(functools.partial(f, out_sharding=said))(a, b)

        def later(x: jax.Array) -> jax.Array:
            return reshard(x, P(None, None, reduced={"x"}))

        residual = jnp.ones((64, 48), BF16)
        own = r"`matmul` requires operands without .* axes, got P\(None, None, reduced=\{'x'\}\) of bfloat16"
        for g, shape in (
            (lambda x, w: ours(x, later(w)), r"\[32, 48\]"),
            (lambda x, w: jax_bwgemm.dot_general(x, later(w), (((1,), (0,)), ((), ())), **H200), r"\[32, 48\]"),
            (lambda x, w: mlp(x, later(w), w.T), r"\[32, 48\]"),
            (lambda x, w: ours(x, w, residual=later(residual)), r"\[64, 48\]"),
        ):
            for of in (one, grad):
                with pytest.raises(ValueError, match=f"{own}{shape}: leave the product to .*, or reshard it first"):
                    jax.jit(of(g, 2))(x, w)


@pytest.mark.parametrize("out_dtype", [None, jnp.int16], ids=["ours", "xla"])
def test_out_sharding_of_more_dimensions(out_dtype: Any) -> None:
    """None of them is nothing, and another entry is an error."""
    x, w = jnp.ones(A, BF16), jnp.ones(B, BF16)
    f = functools.partial(jax_bwgemm.matmul, x, w, out_dtype=out_dtype, on_fallback="ignore")
    with jax.set_mesh(mesh_of(AxisType.Explicit)):
        assert jax.typeof(f(out_sharding=P("x", None, None))).sharding.spec == P("x", None)
        with pytest.raises(ValueError, match=r"at most 2 entries, .*, got P\('x', None, 'y'\): leave out the others"):
            f(out_sharding=P("x", None, "y"))
