"""Abstract evaluation: shapes and dtypes of results, or "`matmul` requires X, got Y". Knows no tile and no device."""

from __future__ import annotations

import dataclasses
import functools
import numbers
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_bwgemm.facts.contraction import Contraction, of_matmul
from jax_bwgemm.facts.epilogue import Epilogue
from jax_bwgemm.facts.problem import Problem
from jax_bwgemm.ops.precision import promotes
from jax_bwgemm.planner.views import View, view

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
        dtype: np.dtype = jnp.dtype(out_dtype)
        return dtype
    except TypeError:
        raise TypeError(f"`out_dtype` requires a dtype, got {out_dtype!r}") from None


def operand_dtypes(epilogue: Epilogue, out_dtype: Any) -> list[Any]:
    """In which an epilogue's operands are given: a number float32, all else as the result."""
    return [jnp.dtype("float32") if x.place == "one" else out_dtype for x in epilogue.operands]


def is_array(x: Any) -> bool:
    """Whether it is one, or a scalar: as `jnp.matmul` takes them, but no lists."""
    has_aval = (hasattr(x, "shape") and hasattr(x, "dtype")) or hasattr(x, "__jax_array__")
    return has_aval or isinstance(x, numbers.Number)


def check_real(name: str, x: Any, dtype: np.dtype) -> None:
    """An array of a caller's loses no imaginary part on its way to a result of `dtype`."""
    if not is_array(x):
        raise TypeError(f"`{name}` requires an array, got {type(x).__name__}")
    given = x.dtype if hasattr(x, "dtype") else jnp.asarray(x).dtype
    if given.kind == "c" != dtype.kind:
        rule = f"real numbers for a result of {dtype}"
        raise ValueError(f"`{name}` requires {rule}, got {given}: pass its real part, or a complex `out_dtype`")


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


def sizes_of(contraction: Contraction, operands: Sequence[Any]) -> tuple[tuple[str, int], ...]:
    """The size of each mode, by the operands' shapes (arrays or avals)."""
    named = zip(contraction.operands, operands, strict=False)
    return tuple({mode: size for modes, x in named for mode, size in zip(modes, x.shape, strict=True)}.items())


def viewed(
    operands: Sequence[Any],
    sources: tuple[str | None, str | None] = (None, None),
    *,
    contraction: Contraction,
    out_dtype: Any,
    epilogue: Epilogue,
    precision: Any = None,
    **_: Any,
) -> tuple[View, Problem]:
    """How a kernel sees a primitive's operands (a and b first; arrays or avals), and the `Problem` that they then pose.

    `sources`: the modes of a and b from before a transpose, if they are had from there.
    """
    dtypes = str(operands[0].dtype), str(operands[1].dtype), str(out_dtype)
    places, reduced = (tuple(x.place for x in own) for own in (epilogue.operands, epilogue.reductions))
    found = view(contraction, sizes_of(contraction, operands), sources, dtypes, places, reduced)
    return found, found.problem(*dtypes, epilogue, promotes(precision), contraction.symmetric)


def _matmul_shape_rule(
    *avals: Any, contraction: Contraction, out_dtype: Any, epilogue: Epilogue, out_sharding: Any = None, **_: Any
) -> Any:
    """The avals of the results. Like every lax rule it wants operands whose shapes and varying axes agree."""
    sizes: dict[str, int] = {}
    for modes, x in zip(contraction.operands, avals, strict=True):
        if len(modes) != x.ndim or any(
            sizes.setdefault(mode, size) != size for mode, size in zip(modes, x.shape, strict=True)
        ):
            raise ValueError(
                f"`matmul_p` requires operands of {contraction}, got {', '.join(str(x.shape) for x in avals)}"
            )
    sharding = _result_sharding(avals[0], avals[1], contraction, out_sharding)
    shape = tuple(sizes[mode] for mode in contraction.out)
    out = avals[0].update(shape=shape, dtype=out_dtype, weak_type=False, sharding=sharding)
    return [*(out for _ in epilogue.results), *(_reduced(out, contraction, modes) for modes in contraction.reduced)]


def _reduced(out: Any, contraction: Contraction, modes: str) -> Any:
    """A vector of these of the result's modes, sharded as they are."""
    kept = [contraction.out.index(mode) for mode in modes]
    spec = whole_spec(out.sharding, len(contraction.out))
    sharding = NamedSharding(out.sharding.mesh, PartitionSpec(*(spec[i] for i in kept)))
    return out.update(shape=tuple(out.shape[i] for i in kept), dtype=jnp.dtype("float32"), sharding=sharding)


def _result_sharding(a: Any, b: Any, contraction: Contraction, out_sharding: Any) -> NamedSharding:
    """Over explicit mesh axes, as `lax.dot_general` has it, errors and all."""
    mesh = b.sharding.mesh if a.sharding.mesh.empty else a.sharding.mesh
    is_sharded = any(axis is not None for x in (a, b) for axis in x.sharding.spec)
    if out_sharding is None and not is_sharded:
        return NamedSharding(mesh, PartitionSpec(*[None] * len(contraction.out)))
    wanted = reordered(out_sharding, contraction.out, contraction.dot_out) if out_sharding is not None else None
    x, y = (jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in (a, b))
    numbers = contraction.dimension_numbers()
    dot = jax.eval_shape(lambda x, y: lax.dot_general(x, y, numbers, out_sharding=wanted), x, y)
    return reordered(dot.sharding, contraction.dot_out, contraction.out)


def named(out_sharding: Any) -> NamedSharding | None:
    """An `out_sharding` as the primitives have it: a spec is on the current mesh."""
    if isinstance(out_sharding, PartitionSpec):
        out_sharding = NamedSharding(jax.sharding.get_abstract_mesh(), out_sharding)
    if not isinstance(out_sharding, NamedSharding | None):
        raise TypeError(f"`out_sharding` requires a `NamedSharding` or a `PartitionSpec`, got {out_sharding!r}")
    if out_sharding is None or isinstance(out_sharding.mesh, jax.sharding.AbstractMesh):
        return out_sharding
    return NamedSharding(out_sharding.mesh.abstract_mesh, out_sharding.spec)


def explicit_sharding(aval: Any) -> NamedSharding | None:
    """Of an aval over explicit mesh axes; None where JAX wants none said."""
    mesh = aval.sharding.mesh
    return aval.sharding if AxisType.Explicit in mesh.axis_types else None


def of_rank(sharding: NamedSharding | None, rank: int) -> NamedSharding | None:
    """With an entry for every dimension, of which a spec may leave out the last ones."""
    if sharding is None or len(sharding.spec) == rank:
        return sharding
    return NamedSharding(sharding.mesh, PartitionSpec(*whole_spec(sharding, rank)))


def reordered(sharding: NamedSharding, modes: str, order: str) -> NamedSharding:
    """Of an array of `modes`, when these stand in another order."""
    spec = dict(zip(modes, whole_spec(sharding, len(modes)), strict=True))
    return NamedSharding(sharding.mesh, PartitionSpec(*(spec[mode] for mode in order)))


def whole_spec(sharding: NamedSharding, rank: int) -> tuple[Any, ...]:
    return (*sharding.spec, *[None] * (rank - len(sharding.spec)))


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


@functools.lru_cache(maxsize=1024)
def contraction_of(a: Shape, b: Shape, epilogue: Epilogue) -> tuple[Contraction, tuple[Shape, Shape]]:
    """With what the epilogue reads, along n or in all modes; and the axes of a and b that only stretch."""
    matmul_shape(a, b)
    found, *axes = of_matmul(a, b)
    extras = tuple("n" if x.place == "n" else found.out for x in epilogue.operands)
    return dataclasses.replace(found, extras=extras), (axes[0], axes[1])
