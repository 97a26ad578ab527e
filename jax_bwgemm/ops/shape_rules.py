"""Abstract evaluation: shapes and dtypes of results, or "`matmul` requires X, got Y". Knows no tile and no device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jax_bwgemm.facts.epilogue import Epilogue
from jax_bwgemm.facts.problem import Problem
from jax_bwgemm.ops.precision import promotes

Shape = tuple[int, ...]


def matmul_shape(a: Shape, b: Shape) -> Shape:
    """The shape of `a @ b` with `jnp.matmul`'s semantics: vectors lose their dimension, batches broadcast."""
    for name, shape in (("a", a), ("b", b)):
        if not shape:
            raise ValueError(f"`matmul` requires `{name}` of rank 1 or more, got a scalar; use `*`")
    k_a, k_b = a[-1], b[0] if len(b) == 1 else b[-2]
    if k_a != k_b:
        raise ValueError(
            f"`matmul` requires the last dimension of `a` to equal the {_second_to_last(b)} of `b`, "
            f"got {k_a} and {k_b} in {_show(a)} @ {_show(b)}"
        )
    return broadcast_batch(a[:-2], b[:-2]) + a[-2:-1] + (b[-1:] if len(b) > 1 else ())


def broadcast_batch(a: Shape, b: Shape) -> Shape:
    """The common batch shape; dimensions of size 1 stretch, missing ones are 1."""
    try:
        return jnp.broadcast_shapes(a, b)
    except ValueError:
        raise ValueError(f"`matmul` requires batch dimensions that broadcast, got {_show(a)} and {_show(b)}") from None


def result_dtype(a: Any, b: Any, out_dtype: Any = None) -> np.dtype:
    """`out_dtype`, else what `jnp.matmul` returns for these operands: ValueError where JAX promotes them to nothing."""
    if out_dtype is None:
        try:
            return jnp.result_type(a, b)
        except ValueError:  # two 8-bit floats that differ, or one beside a wider float
            got = f"{jnp.dtype(a)} and {jnp.dtype(b)}"
            raise ValueError(
                f"`matmul` requires `out_dtype` for operands that JAX promotes to no common dtype, got {got}; "
                "pass it, for example `out_dtype=jnp.bfloat16`"
            ) from None
    try:
        return jnp.dtype(out_dtype)
    except TypeError:
        raise TypeError(f"`out_dtype` requires a dtype, got {out_dtype!r}") from None


def check_bias(bias: Any, a: Shape, b: Shape) -> None:
    """`bias` has shape (n,), so there is an n."""
    if len(b) < 2:
        raise ValueError(f"`bias` requires a matrix `b`, got a vector in {_show(a)} @ {_show(b)}; add it afterwards")
    if jnp.shape(bias) != b[-1:]:
        raise ValueError(f"`bias` requires the shape (n,) = {_show(b[-1:])}, got {_show(jnp.shape(bias))}")


def check_residual(residual: Any, shape: Shape) -> None:
    """`residual` has the result's `shape`: it is read where the result is written."""
    if jnp.shape(residual) != shape:
        raise ValueError(
            f"`residual` requires the result's shape {_show(shape)}, got {_show(jnp.shape(residual))}; "
            "broadcast it first, or add it afterwards"
        )


def sizes(a: Shape, b: Shape, a_major: str, b_major: str) -> tuple[int, int, int, int]:
    """(l, m, n, k) of operands of these shapes; see docs/architecture.md, "The primitive's operands"."""
    m, k = a[1:] if a_major == "k" else a[:0:-1]
    n = b[2] if b_major == "n" else b[1]
    return b[0] if a[0] == 1 else a[0], m, n, k


def problem_of(
    operands: Sequence[Any],
    *,
    a_major: str,
    b_major: str,
    out_dtype: Any,
    epilogue: Epilogue,
    precision: Any = None,
    **_: Any,
) -> Problem:
    """The `Problem` that a primitive's operands (a and b first; arrays or avals) and params pose."""
    a, b = operands[:2]
    batch, m, n, k = sizes(a.shape, b.shape, a_major, b_major)
    dtypes = str(a.dtype), str(b.dtype), str(out_dtype)
    batches = a.shape[0], b.shape[0]
    return Problem(m, n, k, batch, *dtypes, a_major, b_major, *batches, epilogue, promoted=promotes(precision))


def _matmul_shape_rule(
    a: Any, b: Any, *rest: Any, a_major: str, b_major: str, epilogue: Epilogue, **params: Any
) -> Any:
    """The avals of the results, (l, m, n) all. Like every lax rule it wants operands of rank 3, and what the epilogue
    reads in its shapes, whose varying axes agree."""
    problem = problem_of((a, b), a_major=a_major, b_major=b_major, epilogue=epilogue, **params)
    batch, m, n = problem.batch, problem.m, problem.n
    k_b = b.shape[1 if b_major == "n" else 2]
    is_legal = problem.k == k_b and {a.shape[0], b.shape[0]} <= {1, batch}
    if not is_legal or [x.shape for x in rest] != [extra.shape for extra in problem.extras]:
        got = f"{a.shape} {a_major} x {b.shape} {b_major}{''.join(f' + {x.shape}' for x in rest)}"
        wanted = "".join(f" + {extra.role} {extra.shape}" for extra in problem.extras)
        raise ValueError(f"`matmul_p` requires (l, m, k) x (l, k, n){wanted}, got {got}")
    spec = PartitionSpec(
        (b if a.shape[0] == 1 else a).sharding.spec[0],
        a.sharding.spec[1 if a_major == "k" else 2],
        b.sharding.spec[2 if b_major == "n" else 1],
    )
    mesh = b.sharding.mesh if a.sharding.mesh.empty else a.sharding.mesh
    sharding = NamedSharding(mesh, spec)
    out = a.update(shape=(batch, m, n), dtype=params["out_dtype"], weak_type=False, sharding=sharding)
    return [out for _ in problem.results]


def varying_axes(x: Any) -> frozenset[Any]:
    """The manual mesh axes over which `x` varies inside a `shard_map`."""
    aval = jax.typeof(x)
    manual = getattr(aval, "manual_axis_type", None)
    return frozenset(aval.vma if manual is None else manual.varying)


def match_varying(*args: Any) -> tuple[Any, ...]:
    """Casts every argument to vary over the union of all axes; a primitive's operands must agree in them."""
    union = frozenset().union(*map(varying_axes, args))
    return tuple(jax.lax.pcast(x, tuple(sorted(union - varying_axes(x), key=str)), to="varying") for x in args)


def _second_to_last(b: Shape) -> str:
    return "dimension" if len(b) == 1 else "second-to-last dimension"


def _show(shape: Shape) -> str:
    return f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"
