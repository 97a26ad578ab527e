"""Abstract evaluation: shapes and dtypes of results, or "`matmul` requires X, got Y". Knows no tile and no device."""

from __future__ import annotations

import dataclasses
import functools
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
_LEAVE_IT = "leave the product to `jnp.matmul` or `lax.dot_general`"


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
        given = jnp.dtype(out_dtype)
    except TypeError:
        raise TypeError(f"`out_dtype` requires a dtype, got {out_dtype!r}") from None
    try:
        dtype: np.dtype = jax.typeof(np.empty((), given)).dtype  # float32 of float64, unless JAX has that enabled
    except TypeError:
        dtype = np.dtype(object)
    if not _is_numeric(dtype):
        raise TypeError(f"`out_dtype` requires a dtype of JAX's numbers, got {given}")
    return dtype


def operand_dtypes(epilogue: Epilogue, out_dtype: Any) -> list[Any]:
    """In which an epilogue's operands are given: a number float32, all else as the result."""
    return [jnp.dtype("float32") if x.place == "one" else out_dtype for x in epilogue.operands]


def check_array(name: str, x: Any) -> None:
    """Arrays of numbers and scalars, as `jnp.matmul` takes them, but no lists; also what stands for one."""
    if hasattr(x, "__jax_array__"):
        return
    try:
        dtype = jax.typeof(x).dtype
    except TypeError:
        if not isinstance(x, np.ndarray | np.generic):
            raise TypeError(f"`{name}` requires an array, got {type(x).__name__}") from None
        dtype = None
    if dtype is None or not _is_numeric(dtype):
        raise TypeError(f"`{name}` requires an array of numbers, got one of {x.dtype}")


def _is_numeric(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.number) or jnp.issubdtype(dtype, jnp.bool_))


def check_real(name: str, x: Any, dtype: np.dtype) -> None:
    """An array of a caller's loses no imaginary part on its way to a result of `dtype`."""
    check_array(name, x)
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
    if len({x.memory_space for x in avals}) > 1:
        raise ValueError(
            f"`matmul` requires operands in one memory space, got {', '.join(str(x.memory_space) for x in avals)}: "
            "move them first, for example by `jax.device_put`"
        )
    sharding = _result_sharding(avals, contraction, out_sharding)
    shape = tuple(sizes[mode] for mode in contraction.out)
    out = avals[0].update(shape=shape, dtype=out_dtype, weak_type=False, sharding=sharding)
    return [*(out for _ in epilogue.results), *(_reduced(out, contraction, modes) for modes in contraction.reduced)]


def _reduced(out: Any, contraction: Contraction, modes: str) -> Any:
    """A vector of these of the result's modes, sharded as they are."""
    shape = tuple(out.shape[contraction.out.index(mode)] for mode in modes)
    return out.update(shape=shape, dtype=jnp.dtype("float32"), sharding=reordered(out.sharding, contraction.out, modes))


def _result_sharding(avals: Sequence[Any], contraction: Contraction, out_sharding: Any) -> NamedSharding:
    """Over explicit mesh axes: as JAX has it, errors and all, of the products and, where it is not said, of their sum
    with what the epilogue reads."""
    for x in avals:
        if has_partial_sums(x.sharding):
            raise ValueError(
                f"`matmul` requires operands without `unreduced` and `reduced` axes, got {x.sharding.spec} of "
                f"{x.dtype}{list(x.shape)}: {_LEAVE_IT}, or reshard it first"
            )
    mesh = next((x.sharding.mesh for x in avals if not x.sharding.mesh.empty), avals[0].sharding.mesh)
    is_sharded = any(axis is not None for x in avals for axis in x.sharding.spec)
    if out_sharding is None and not is_sharded:
        return NamedSharding(mesh, PartitionSpec(*[None] * len(contraction.out)))
    wanted = reordered(out_sharding, contraction.out, contraction.dot_out) if out_sharding is not None else None
    numbers, num_bs = contraction.dimension_numbers(), contraction.num_bs

    def result(a: jax.Array, *others: jax.Array) -> jax.Array:
        terms = [lax.dot_general(a, b, numbers, out_sharding=wanted) for b in others[:num_bs]]
        if wanted is None:
            extras = zip(others[num_bs:], contraction.extras, strict=True)
            terms += [_spread(x, modes, contraction.dot_out, terms[0]) for x, modes in extras]
        return functools.reduce(lax.add, terms)

    # Not by `jax.eval_shape`, which returns no sharding where other axes of the mesh are automatic.
    structs = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in avals]
    (found,) = jax.make_jaxpr(result)(*structs).out_avals
    return reordered(found.sharding, contraction.dot_out, contraction.out)


def sharded_alike(
    extras: Sequence[jax.Array], avals: Sequence[Any], contraction: Contraction, out_sharding: Any
) -> tuple[Sequence[jax.Array], Any]:
    """What an epilogue reads, the last operands of `avals`, sharded as the result is; and how that is. So are tangents
    then, and a cotangent of `extras` returns to where these were. Without explicit mesh axes both as they are given."""
    sharding = _result_sharding(avals, contraction, out_sharding)
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return extras, out_sharding
    read = zip(extras, contraction.extras, strict=True)
    return [jax.sharding.reshard(x, reordered(sharding, contraction.out, modes)) for x, modes in read], sharding


def _spread(x: jax.Array, modes: str, order: str, like: jax.Array) -> jax.Array:
    """An array of `modes`, repeated to the shape, and in the dtype, of one whose modes stand in `order`."""
    dims = list(map(order.index, modes))
    x = lax.transpose(x.astype(like.dtype), sorted(range(x.ndim), key=dims.__getitem__))
    return lax.broadcast_in_dim(x, like.shape, sorted(dims))


def named(out_sharding: Any) -> NamedSharding | None:
    """An `out_sharding` as the primitives have it: a spec is on the current mesh."""
    if isinstance(out_sharding, PartitionSpec):
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty:
            raise ValueError(
                f"`out_sharding` requires a current mesh for a `PartitionSpec`, got {out_sharding} and none: call it "
                "under `jax.set_mesh`, or pass a `NamedSharding`"
            )
        out_sharding = NamedSharding(mesh, out_sharding)
    if not isinstance(out_sharding, NamedSharding | None):
        raise TypeError(f"`out_sharding` requires a `NamedSharding` or a `PartitionSpec`, got {out_sharding!r}")
    if out_sharding is not None and has_partial_sums(out_sharding):
        rule = "`out_sharding` requires a spec without `unreduced` and `reduced` axes"
        raise ValueError(f"{rule}, got {out_sharding.spec}: {_LEAVE_IT}")
    if out_sharding is None or isinstance(out_sharding.mesh, jax.sharding.AbstractMesh):
        return out_sharding
    return NamedSharding(out_sharding.mesh.abstract_mesh, out_sharding.spec)


def has_partial_sums(sharding: NamedSharding) -> bool:
    """Whether a sum over mesh axes is still to be done, of the array or of its cotangent: our primitives know no such
    type."""
    return bool(sharding.spec.unreduced or sharding.spec.reduced)


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
    """An entry for every dimension, of which a spec may leave out the last ones. ValueError where it has more."""
    spec = tuple(sharding.spec)
    if any(axis is not None for axis in spec[rank:]):
        raise ValueError(
            f"`out_sharding` requires at most {rank} entries, for the result's dimensions, got {sharding.spec}: leave "
            "out the others"
        )
    return (*spec[:rank], *[None] * (rank - len(spec)))


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
