"""How a product is divided over a mesh that XLA partitions: a Shardy rule, and what each device then computes.

It is applied at lowering alone, so that differentiation and vmap know nothing of it. A device computes the product of
its shards, with the tile for their sizes, and the partitioner adds the collectives that jnp's product would have: none
for batches, rows and columns; for a sharded sum, partial products that are added in the result's dtype.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.xla_metadata import set_xla_metadata
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec

from jax_bwgemm._version import __version__
from jax_bwgemm.facts.contraction import Contraction
from jax_bwgemm.facts.epilogue import Epilogue
from jax_bwgemm.facts.problem import FP8_DTYPES
from jax_bwgemm.facts.recipe import ALIGN_BYTES
from jax_bwgemm.ops.primitive import fused_matmul_p, fused_product, is_linear, matmul_p
from jax_bwgemm.ops.reference import aligned, finish
from jax_bwgemm.ops.shape_rules import explicit_sharding, sizes_of, whole_spec
from jax_bwgemm.runtime import artifacts

Axes = tuple[str, ...]
Placement = Mapping[str, Axes]  # the mesh axes over which a mode is sharded
DIGEST_DIGITS = 16
FLOPS_A_BYTE = 1500  # that a device computes while it moves a byte: an H200's 0.7 PFLOP/s beside 450 GB/s of NVLink

try:
    # Primitives that are told the devices when they are lowered, as custom_partitioning has to be: no public name yet.
    from jax._src.dispatch import prim_requires_devices_during_lowering

    told_devices: set[Any] = prim_requires_devices_during_lowering
    told_devices |= {matmul_p, fused_matmul_p}
except ImportError:  # `why_not` says so where it matters
    told_devices = set()


def spans_devices(ctx: Any) -> bool:
    """Whether the program that is being lowered runs on several devices: then collectives may run beside a kernel."""
    context = ctx.module_context.axis_context
    mesh = getattr(context, "mesh", None)
    return (getattr(context, "num_devices", 1) or 1) > 1 if mesh is None else mesh.size > 1


def is_divided(ctx: Any) -> bool:
    """Whether XLA partitions the program that is being lowered: not for one device, nor in a shard_map of all axes."""
    context = ctx.module_context.axis_context
    manual = getattr(context, "manual_axes", None)
    if manual is not None:
        return any(size > 1 for axis, size in context.mesh.shape.items() if axis not in manual)
    return (getattr(context, "num_devices", 1) or 1) > 1


def why_not(ctx: Any) -> str | None:
    """Why a divided program cannot have our kernels."""
    context = ctx.module_context.axis_context
    manual = getattr(context, "manual_axes", None)
    if manual:
        names = ", ".join(str(axis) for axis in context.mesh.axis_names if axis not in manual)
        return f"in a `shard_map` a kernel requires all mesh axes to be manual, and {names} is left to XLA"
    if manual is None and getattr(context, "device_assignment", None) is None:
        return f"jax {jax.__version__} does not tell the devices of a mesh to a product that is lowered"
    if manual is None and _mesh_of(context) is None:
        return "a kernel requires shardings over one mesh (`NamedSharding`), and there is none"
    if not getattr(jax.config, "jax_use_shardy_partitioner", True):
        return (
            "over a mesh a kernel requires the Shardy partitioner, and it is off: set `jax_use_shardy_partitioner`, or "
            "map over all axes with `jax.shard_map`"
        )
    if getattr(ctx.module_context.lowering_parameters, "for_export", False):
        return (
            "an exported program divides no kernel over a mesh, which takes a callback into this process: map over all "
            "axes with `jax.shard_map`"
        )
    return None


def _mesh_of(context: Any) -> Any:
    """Of the program's arguments, results and constraints, else of `jax.set_mesh`: JAX tells none where operands are
    placed only by what is in the program."""
    told = getattr(context, "abstract_mesh", None)
    current = jax.sharding.get_abstract_mesh()
    return told if told is not None or current.empty or current.size != context.num_devices else current


def lower_divided(ctx: Any, operands: Sequence[Any], params: dict[str, Any]) -> Sequence[Any]:
    """Of a program for which there is no `why_not`. The local products are lowered like any other, when the partitioner
    knows the shards."""
    divided = custom_partitioning(_Product(params))
    divided.def_partition(partition=_Partition(params), sharding_rule=sharding_rule(params))

    def call(*operands: jax.Array) -> tuple[jax.Array, ...]:
        with set_xla_metadata(jax_bwgemm=_digest(params)):
            outs: tuple[jax.Array, ...] = divided(*operands)
        return tuple(_as_typed(out, aval) for out, aval in zip(outs, ctx.avals_out, strict=True))

    module, context = ctx.module_context, ctx.module_context.axis_context
    if getattr(context, "manual_axes", None) is None and context.abstract_mesh is None:
        told = dataclasses.replace(context, abstract_mesh=_mesh_of(context))
        ctx = ctx.replace(module_context=module.replace(axis_context=told))
    emitted: Sequence[Any] = mlir.lower_fun(call, multiple_results=True)(ctx, *operands)
    return emitted


def _digest(params: dict[str, Any]) -> str:
    """What tells one product from another of the same shapes, for the key of JAX's persistent compilation cache: beside
    it the program has only the callback's address, which users leave out of the key. With the manifests, for the
    callback chooses from these."""
    told = [f"{name}={value!r}" for name, value in sorted(params.items())]
    return hashlib.sha256("\n".join([__version__, *artifacts.digests(), *told]).encode()).hexdigest()[:DIGEST_DIGITS]


def _as_typed(out: jax.Array, aval: Any) -> jax.Array:
    """Over explicit axes the partitioner is told what the type says."""
    sharding = explicit_sharding(aval)
    return out if sharding is None else jax.sharding.reshard(out, sharding)


def sharding_rule(params: dict[str, Any]) -> str:
    """Shardy's, einsum-like: the modes with spaces between."""
    contraction: Contraction = params["contraction"]
    operands = ", ".join(map(" ".join, contraction.operands))
    results = [contraction.out] * len(params["epilogue"].results) + list(contraction.reduced)
    return f"{operands} -> {', '.join(map(' '.join, results))}"


@dataclasses.dataclass(frozen=True)
class Division:
    """How modes are sharded: of operands, of what the epilogue reads, and of results.

    `summed`: the axes over which partial products are added. `scattered`: the mode along which each device then keeps a
    part, over its last axes, which are `over`; operands have all of it.
    """

    operands: Placement
    result: Placement
    summed: Axes = ()
    scattered: str | None = None
    over: Axes = ()


def divide(
    contraction: Contraction, sizes: Mapping[str, int], mesh: Mapping[str, int], specs: Sequence[Placement],
    result: Placement, widths: tuple[int, int, int] = (2, 2, 2), may_sum: bool = True,
) -> Division:  # fmt: skip
    """What is done with operands a, b as `specs` have them, and a result that is wanted as `result` says; `widths` are
    the bytes of an element of a, b and the result.

    An axis divides one mode. It stays with a mode of the result that asks for it, if an operand has it there or no sum
    does: a summed mode that both operands have on that axis makes partial products, reduced and scattered, over all the
    last axes of a mode of the result that are such. Unless it `may_sum`, there are no partial products: what is sharded
    along a sum is gathered.

    Shards of unequal sizes are padded with anything, which is neither summed nor reduced.
    """
    a, b = specs[:2]
    kept: dict[str, Axes] = {}
    used: set[str] = set()
    scattered: str | None = None
    over: Axes = ()
    summable = contraction.summed if may_sum else ""
    both = {axis for mode in summable for axis in set(a.get(mode, ())) & set(b.get(mode, ()))}
    for mode in contraction.out:
        own = {axis for x in (a, b) for axis in x.get(mode, ())}
        axes = result.get(mode, ())
        num_last = len(list(itertools.takewhile((both - own).__contains__, reversed(axes))))
        if num_last and scattered is None:
            scattered, over, axes = mode, axes[-num_last:], axes[:-num_last]
        kept[mode] = tuple(axis for axis in axes if axis not in used)
        used |= set(kept[mode])
    for mode in contraction.out:  # a result that is to be gathered is so afterwards
        if not kept[mode] and mode != scattered:
            kept[mode] = _free(next((x[mode] for x in (a, b) if x.get(mode)), ()), used)
            used |= set(kept[mode])
        if any(mode not in modes for modes in contraction.reduced) and sizes[mode] % _parts(mesh, kept[mode]):
            used -= set(kept[mode])
            kept[mode] = ()
    summed: list[str] = []
    for mode in contraction.summed:
        kept[mode] = _axes_of_sum(contraction, mode, sizes, mesh, (a, b), kept, used, widths) if may_sum else ()
        used |= set(kept[mode])
        summed += kept[mode]
    wanted = {mode: kept[mode] for mode in contraction.out}
    if scattered is not None:
        parts = *kept[scattered], *over
        if set(over) <= set(summed) and sizes[scattered] % _parts(mesh, parts) == 0:
            wanted[scattered] = parts
        else:
            scattered, over = None, ()
    return Division(kept, wanted, tuple(summed), scattered, over)


def _axes_of_sum(
    contraction: Contraction, mode: str, sizes: Mapping[str, int], mesh: Mapping[str, int], specs: Sequence[Placement],
    kept: Placement, used: set[str], widths: tuple[int, int, int],
) -> Axes:  # fmt: skip
    """The axes over which a summed mode makes partial products, none where what is sharded is gathered instead.

    What both operands have sharded, in any order, or one of them further, makes some; what a single one has, where
    adding them takes no longer than gathering that operand, for then all devices of these axes compute the same.
    """
    own = [_free(spec.get(mode, ()), used) for spec in specs]
    shards = [_shard_elems(modes, sizes, mesh, kept) for modes in contraction.operands[:2]]
    moved = [elems * width for elems, width in zip(shards, widths[:2], strict=True)]
    axes = max(zip(own, moved, strict=True), key=lambda x: (len(x[0]), x[1]))[0]
    gathered = sum(size for size, has in zip(moved, own, strict=True) if has)
    results = _shard_elems(contraction.out, sizes, mesh, kept)
    repeated = 2 * results * sizes[mode] * (1 - 1 / _parts(mesh, axes))
    is_shared = all(set(has) and set(has) <= set(axes) for has in own)
    is_sooner = 2 * results * widths[2] <= gathered + repeated / FLOPS_A_BYTE
    return axes if (is_shared or is_sooner) and sizes[mode] % _parts(mesh, axes) == 0 else ()


def retained(
    modes: str, spec: Placement, wanted: Placement, sizes: Mapping[str, int], mesh: Mapping[str, int]
) -> Placement:
    """The axes, by mode, of which an operand that has them as `spec` says is gathered by us, behind what else is done
    to have it as `wanted`: XLA gathers all of an operand first, of which it then cuts a part."""
    is_cut = any(set(wanted.get(mode, ())) - set(spec.get(mode, ())) for mode in modes)
    taken = {axis for mode in modes for axis in wanted.get(mode, ())}
    found: dict[str, Axes] = {}
    for mode in modes if is_cut else "":
        axes, kept = spec.get(mode, ()), wanted.get(mode, ())
        if axes[: len(kept)] == kept and sizes[mode] % _parts(mesh, axes) == 0:
            found[mode] = tuple(itertools.takewhile(lambda axis: axis not in taken, axes[len(kept) :]))
    return found


def _shard_elems(modes: str, sizes: Mapping[str, int], mesh: Mapping[str, int], kept: Placement) -> int:
    """Of an array whose modes are sharded as far as that is settled."""
    return math.prod(-(-sizes[mode] // _parts(mesh, kept.get(mode, ()))) for mode in modes)


def _parts(mesh: Mapping[str, int], axes: Axes) -> int:
    return math.prod(mesh[axis] for axis in axes)


def _free(axes: Iterable[str], used: set[str]) -> Axes:
    return tuple(axis for axis in axes if axis not in used)


class _Product:
    """What is divided, as JAX traces it for the whole arrays' types."""

    __name__ = "bwgemm"

    def __init__(self, params: dict[str, Any]) -> None:
        self.params = params

    def __call__(self, *operands: jax.Array) -> tuple[jax.Array, ...]:
        return fused_product(operands[0], operands[1], operands[2:], **self.params)


class _Partition:
    """custom_partitioning's callback: shards and their sizes -> the local function, and the shardings that it takes."""

    def __init__(self, params: dict[str, Any]) -> None:
        self.params = params

    def __call__(self, mesh: Any, operands: Sequence[Any], results: Sequence[Any]) -> Any:
        contraction: Contraction = self.params["contraction"]
        specs = [_placement(modes, x) for modes, x in zip(contraction.operands, operands, strict=True)]
        sizes = dict(sizes_of(contraction, operands))
        a, b, out = (x.dtype.itemsize for x in (*operands[:2], results[0]))
        wanted, may_sum = _placement(contraction.out, results[0]), not self.params["settings"].is_batch_invariant
        found = divide(contraction, sizes, mesh.shape, specs, wanted, (a, b, out), may_sum)
        later = [
            retained(modes, spec, found.operands, sizes, mesh.shape)
            for modes, spec in zip(contraction.factors, specs, strict=False)
        ]

        def local(*operands: jax.Array) -> tuple[jax.Array, ...]:
            # Not under the mesh of `jax.set_mesh`: these are shards, of which it knows nothing.
            with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
                factors = map(_gathered, operands, contraction.factors, later)
                shards = *factors, *operands[len(later) :]
                return _whole_reductions(_local(shards, found, self.params), found, self.params)

        def sharding(modes: str, placement: Placement) -> NamedSharding:
            return NamedSharding(mesh, PartitionSpec(*(placement[mode] or None for mode in modes)))

        out = sharding(contraction.out, found.result)
        factors = [
            sharding(modes, {mode: (*found.operands[mode], *own.get(mode, ())) for mode in modes})
            for modes, own in zip(contraction.factors, later, strict=True)
        ]
        extras = [sharding(modes, found.result) for modes in contraction.extras]
        reduced = [sharding(modes, found.result) for modes in contraction.reduced]
        return mesh, local, (*[out] * (len(results) - len(reduced)), *reduced), (*factors, *extras)


def _gathered(x: jax.Array, modes: str, over: Placement) -> jax.Array:
    for dim, mode in enumerate(modes):
        if axes := over.get(mode):
            x = lax.all_gather(x, axes, axis=dim, tiled=True)
    return x


def _placement(modes: str, x: Any) -> Placement:
    spec = whole_spec(x.sharding, len(modes))
    axes = ((axis,) if isinstance(axis, str) else tuple(axis or ()) for axis in spec)
    return dict(zip(modes, axes, strict=True))


def _local(operands: Sequence[jax.Array], division: Division, params: dict[str, Any]) -> tuple[jax.Array, ...]:
    """The results of a device, of its shards."""
    a, b, *others = map(_aligned, operands)
    contraction: Contraction = params["contraction"]
    tile = params["tile"]
    if any(division.operands[mode] for mode in contraction.free_a + contraction.free_b):  # b's shard is not a's
        contraction = dataclasses.replace(contraction, symmetric=False)
        tile = None if tile is not None and tile.symmetric else tile
    params = params | {"out_sharding": None, "contraction": contraction, "tile": tile}
    if not division.summed:
        return fused_product(a, b, others, **params)
    bs, extras = (b, *others[: contraction.num_bs - 1]), others[contraction.num_bs - 1 :]
    epilogue, out_dtype, is_scaled = params["epilogue"], params["out_dtype"], is_linear(params["epilogue"])
    own = params | {
        "contraction": dataclasses.replace(contraction, extras=(), num_bs=1, reduced=()),
        "out_dtype": sum_dtype(out_dtype, params["settings"].partial_sums),
    }
    partials = [fused_product(a, b, (), **own | {"epilogue": epilogue if is_scaled else Epilogue()})[0] for b in bs]
    sums = [_added(partial, division, contraction) for partial in partials]
    if is_scaled:
        return finish(sums, Epilogue(), (), out_dtype) if sums[0].dtype != out_dtype else tuple(sums)
    wide = [acc.astype(jnp.float32) for acc in sums]
    return finish(wide, epilogue, aligned(extras, contraction), out_dtype, contraction.reduced_axes)


def _whole_reductions(
    results: Sequence[jax.Array], division: Division, params: dict[str, Any]
) -> tuple[jax.Array, ...]:
    """With those over what devices share, each of which has one over its part."""
    contraction, reductions = params["contraction"], params["epilogue"].reductions
    num = len(results) - len(reductions)
    found = list(results[:num])
    for x, own, modes in zip(results[num:], reductions, contraction.reduced, strict=True):
        axes = tuple(axis for mode in contraction.out if mode not in modes for axis in division.result[mode])
        if axes:
            x = lax.psum(x, axes) if own.reducer == "sum" else lax.pmax(x, axes)
        found.append(x)
    return tuple(found)


def _aligned(x: jax.Array) -> jax.Array:
    """The partitioner may slice a shard out of a whole array, and hand over a pointer into it: where that starts
    between two 16-byte units, no kernel can read it."""
    return x if x.size * x.dtype.itemsize % ALIGN_BYTES == 0 else lax.optimization_barrier(x)


def sum_dtype(out_dtype: Any, partial_sums: str) -> Any:
    """In which dtype devices add their parts of a result: its own, as XLA does it, or float32 on request. 8-bit floats,
    whose sums XLA does not offer, in two bytes."""
    if partial_sums == "float32" and str(out_dtype) != "int32":
        return jnp.dtype("float32")
    return jnp.dtype("bfloat16") if str(out_dtype) in FP8_DTYPES else out_dtype


def _added(partial: jax.Array, division: Division, contraction: Contraction) -> jax.Array:
    """The sum over the devices that have parts of it, or this device's part of that."""
    if division.scattered is None:
        whole: jax.Array = lax.psum(partial, division.summed)
        return whole
    rest = _free(division.summed, set(division.over))
    partial = lax.psum(partial, rest) if rest else partial
    dim = contraction.out.index(division.scattered)
    own: jax.Array = lax.psum_scatter(partial, division.over, scatter_dimension=dim, tiled=True)
    return own
