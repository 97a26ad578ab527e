"""Emits the operands of a kernel as a view and a route say, from before a transpose or as given, padded or transposed
first; and its results as the product's.

Knows no device and no kernel: who calls hands over what emits a repack.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec

from jax_bwgemm.facts.contraction import Contraction
from jax_bwgemm.facts.epilogue import Epilogue
from jax_bwgemm.facts.padding import TMA_ALIGN_BYTES, is_padded_together
from jax_bwgemm.facts.repack import SOURCES
from jax_bwgemm.ops.origins import before_transpose, is_fusible, may_be_in_loop, slice_step_bytes
from jax_bwgemm.ops.reference import REDUCERS
from jax_bwgemm.ops.shape_rules import sizes_of
from jax_bwgemm.planner.routes import Route
from jax_bwgemm.planner.views import View

# (context, kind of repack, values, avals, avals of the results) -> the repacked values; None where there is no kernel.
EmitRepack = Callable[[Any, str, Sequence[Any], Sequence[Any], Sequence[Any]], Sequence[Any] | None]


@dataclasses.dataclass(frozen=True)
class Source:
    """What an operand is a transpose of, as `w` in `x @ w.T`: `modes` lie there in this order."""

    value: Any
    modes: str


Sources = tuple[Source | None, ...]  # of a and of every b


@dataclasses.dataclass
class _Factor:
    """A factor on its way into a kernel: as it lies now, and how it is wanted; `kind`: the repack that it needs."""

    value: Any
    aval: Any
    wanted: Any
    kind: str = ""


def sources(operands: Sequence[Any], contraction: Contraction) -> Sources:
    """Of two b, if both are transposes alike: they are read in one way."""
    a, *bs = (_source(x, modes) for x, modes in zip(operands, contraction.factors, strict=False))
    alike = len({source and source.modes for source in bs}) == 1
    return a, *(bs if alike else [None] * len(bs))


def _source(value: Any, modes: str) -> Source | None:
    found = before_transpose(value)
    return Source(found[0], "".join(modes[i] for i in found[1])) if found else None


def whole_sources(
    ctx: Any, operands: Sequence[Any], contraction: Contraction, taken: Sequence[Source | None]
) -> tuple[Any, list[Any], Contraction]:
    """The same product of what is `taken` in the place of a or b: its context, operands and contraction. Only where
    that has the operand's dimensions, whose shardings are known, and no more than some of size 1 between."""
    if contraction.num_bs > 1:  # whose modes are one's: they are taken as they are given
        return ctx, list(operands), contraction
    avals, values, modes = list(ctx.avals_in), list(operands), list(contraction.operands[:2])
    for i, source in enumerate(taken):
        if source is None:
            continue
        aval, order = avals[i], [modes[i].index(mode) for mode in source.modes]
        shape = tuple(aval.shape[j] for j in order)
        if [n for n in source.value.type.shape if n != 1] != [n for n in shape if n != 1]:
            continue
        spec = PartitionSpec(*(aval.sharding.spec[j] for j in order))
        avals[i] = aval.update(shape=shape, sharding=NamedSharding(aval.sharding.mesh, spec))
        values[i], modes[i] = reshaped(source.value, shape), source.modes
    return ctx.replace(avals_in=avals), values, dataclasses.replace(contraction, a=modes[0], b=modes[1])


@dataclasses.dataclass(frozen=True)
class Taker:
    """Emits what the kernel of `view` reads and what it makes: the operands of the `ctx`, which lie as `contraction`
    says, and what they are transposes of. With several `parts`, the kernel makes of each of these of k a float32
    result."""

    ctx: Any
    contraction: Contraction
    epilogue: Epilogue
    view: View
    sources: Sources
    parts: int = 1

    def take(
        self, route: Route, operands: Sequence[Any], repack: EmitRepack, takes_one: bool = False
    ) -> tuple[list[Any], list[Any]]:
        """(values, avals) of the kernel's operands, the way that `route` says; `takes_one`: a is b, too."""
        count = len(self.contraction.factors)
        factors = [self._factor(route, i, operands) for i in range(1 if takes_one else count)]
        _repack_all(self.ctx, factors, repack, is_padded_together(route.problem) and not may_be_in_loop())
        pairs = [(factor.value, factor.wanted) for factor in factors]
        others = operands[count:], self.ctx.avals_in[count:]
        view = self.view
        spans = {"one": ("", (1,)), "m": (view.row_modes, (view.m,)), "n": (view.column_modes, (view.n,))}
        for x, modes, value, aval in zip(self.epilogue.operands, self.contraction.extras, *others, strict=True):
            whole, shape = spans.get(x.place, (view.out, self._result_shape))
            pairs.append(self._as(_aligned(self.ctx, value, aval), aval, modes, whole, shape))
        return [value for value, _ in pairs], [aval for _, aval in pairs]

    def lies_alike(self, i: int) -> bool:
        """Whether the `i`-th operand of the epilogue is one matrix, and lies as the result does, for the user and for
        the kernel."""
        given, out = self.ctx.avals_in[len(self.contraction.factors) + i], self.ctx.avals_out[0]
        is_matrix = given.shape == out.shape == (self.view.m, self.view.n) and given.dtype == out.dtype
        return is_matrix and self.contraction.extras[i] == self.contraction.out == self.view.out

    def result_aval(self, aval: Any) -> Any:
        """A result's, as the kernel makes it."""
        if self.parts > 1:
            return reshape_aval(aval, (self.parts, self.view.m, self.view.n)).update(dtype=jnp.dtype("float32"))
        return reshape_aval(aval, self._result_shape)

    def give(self, value: Any, aval: Any) -> Any:
        """A kernel's result as the product's, whose aval is given."""
        if self.parts > 1:
            whole = reshape_aval(aval, self._result_shape)
            value = _emit(self.ctx, functools.partial(_added, dtype=aval.dtype), value, self.result_aval(aval), whole)
        out = "".join(mode for mode in self.contraction.out if mode in self.view.out)
        if out == self.view.out:
            return self._reshaped(value, aval)
        sizes = self._sizes
        own = reshape_aval(aval, tuple(sizes[mode] for mode in self.view.out))
        value = self._reshaped(value, own)
        return self._as(value, own, self.view.out, out, aval.shape)[0]

    def give_reduced(self, value: Any, part: Any, aval: Any, i: int) -> Any:
        """A kernel's parts (l, parts, m or n) of the `i`-th reduction, of the aval `part`, as that, of the aval given.
        Over a mode that is none of its own it goes here, too."""
        view, sizes, own = self.view, self._sizes, self.epilogue.reductions[i]
        given = view.lead + (view.column_modes if own.place == "n" else view.row_modes)
        modes = "".join(mode for mode in self.contraction.reduced[i] if mode in given)
        over = tuple(j for j, mode in enumerate(given) if mode not in modes)
        left = [mode for mode in given if mode in modes]

        def reduced(x: jax.Array) -> jax.Array:
            x = lax.reshape(REDUCERS[own.reducer](x, 1), [sizes[mode] for mode in given])
            x = REDUCERS[own.reducer](x, over) if over else x
            return lax.reshape(lax.transpose(x, [left.index(mode) for mode in modes]), aval.shape)

        return _emit(self.ctx, reduced, value, part, aval)

    @property
    def _result_shape(self) -> tuple[int, int, int]:
        return self.view.batch, self.view.m, self.view.n

    @property
    def _sizes(self) -> dict[str, int]:
        return dict(sizes_of(self.contraction, self.ctx.avals_in))

    def _factor(self, route: Route, i: int, operands: Sequence[Any]) -> _Factor:
        """The `i`-th factor as the kernel has them: every one but the first is read as the second is."""
        ctx, idx = self.ctx, 1 - i if self.view.flips else i
        value, aval, modes = operands[idx], ctx.avals_in[idx], self.contraction.operands[idx]
        i = min(i, 1)
        way = (self.view.rows, self.view.columns)[i][int(route.from_source[i])]
        if way.moves:
            value, given = self._as(value, aval, modes, way.order, way.shape)
        else:
            source = None if way.is_given else self.sources[idx]
            given = reshape_aval(aval, way.shape)
            value = self._reshaped(source.value if source else value, given)
        lying = _flipped(given) if route.transposes[i] else given
        *slow, contiguous = lying.shape
        final = reshape_aval(lying, (*slow, contiguous + route.padding(i)))
        kind = "transpose" if route.transposes[i] else "pad" if route.padding(i) else ""
        return _Factor(value, given, final, kind) if kind else _Factor(_aligned(ctx, value, given), given, given)

    def _as(self, value: Any, aval: Any, modes: str, order: str, shape: tuple[int, ...]) -> tuple[Any, Any]:
        """With its modes in `order`, repeated along those that it lacks, as `shape`; modes of size 1 may be missing."""
        final, sizes = reshape_aval(aval, shape), self._sizes
        if "".join(mode for mode in modes if mode in order) == order:
            return self._reshaped(value, final), final

        def moved(x: jax.Array) -> jax.Array:
            own = [mode for mode in modes if mode in order]
            x = lax.reshape(x, [sizes[mode] for mode in own])
            found = [mode for mode in order if mode in own]
            x = lax.transpose(x, [own.index(mode) for mode in found])
            x = lax.broadcast_in_dim(x, [sizes[mode] for mode in order], [order.index(mode) for mode in found])
            return lax.reshape(x, shape)

        return _emit(self.ctx, moved, value, reshape_aval(aval, aval.shape), final), final

    def _reshaped(self, value: Any, final: Any) -> Any:
        """As `final`, whose sizes may be symbols. What is emitted of these asks what it reshapes for no sizes, so that
        any aval with as many elements will do."""
        if is_static(final):
            return reshaped(value, final.shape)
        flat = (math.prod(final.shape),)
        own = reshape_aval(final, flat if len(final.shape) != 1 else (1, *flat))
        return _emit(self.ctx, lambda x: lax.reshape(x, final.shape), value, own, final)


def _added(parts: jax.Array, dtype: Any) -> jax.Array:
    """One after the other, in their order, which no `reduce` promises."""
    one_by_one = (lax.slice_in_dim(parts, i, i + 1) for i in range(parts.shape[0]))
    return lax.convert_element_type(functools.reduce(lax.add, one_by_one), dtype)


def _flipped(aval: Any) -> Any:
    batch, rows, cols = aval.shape
    return aval.update(shape=(batch, cols, rows))


def is_static(aval: Any) -> bool:
    """Whether none of its sizes is a symbol of `jax.export`."""
    return all(isinstance(size, int) for size in aval.shape)


def type_of(aval: Any) -> Any:
    """What MLIR calls a tensor of its shape, in which symbols are one unknown size like the other."""
    shape = [size if isinstance(size, int) else ir.ShapedType.get_dynamic_size() for size in aval.shape]
    return ir.RankedTensorType.get(shape, mlir.dtype_to_ir_type(aval.dtype))


def reshaped(value: Any, shape: tuple[int, ...]) -> Any:
    if tuple(value.type.shape) == shape:
        return value
    return stablehlo.reshape(ir.RankedTensorType.get(shape, value.type.element_type), value)


def _repack_all(ctx: Any, factors: Sequence[_Factor], repack: EmitRepack, together: bool) -> None:
    """Each as it is wanted. Pads have zeros behind the contiguous dimension: by repacks, two of them in one launch if
    they go `together`, or by XLA where that is no pass of its own."""
    module, size = ctx.module_context.module.operation, SOURCES["pad"] if together else 1
    ours = [x for x in factors if x.kind == "pad" and is_static(x.wanted) and not is_fusible(x.value, module)]
    groups = [ours[i : i + size] for i in range(0, len(ours), size)]
    for group in groups + [[x] for x in factors if x.kind == "transpose"]:
        avals = [reshape_aval(x.aval, x.aval.shape) for x in group]
        made = repack(ctx, group[0].kind, [x.value for x in group], avals, [x.wanted for x in group])
        for x, value in zip(group, made, strict=True) if made else ():
            x.value, x.kind = value, ""
    for x in factors:
        if x.kind:
            assert x.kind == "pad"  # a route transposes only what there is a repack for
            x.value = _padded_by_xla(ctx, x)


def _padded_by_xla(ctx: Any, factor: _Factor) -> Any:
    aval = reshape_aval(factor.aval, factor.aval.shape)
    edges = [(0, 0, 0), (0, 0, 0), (0, factor.wanted.shape[2] - aval.shape[2], 0)]
    return _emit(ctx, lambda x: lax.pad(x, jnp.zeros((), x.dtype), edges), factor.value, aval, factor.wanted)


def barrier(value: Any) -> Any:
    """What XLA allocates by itself: neither a part of a larger array nor stored into one."""
    return stablehlo.optimization_barrier([value])


def is_aligned(ctx: Any, value: Any, aval: Any) -> bool:
    """Whether no slice, or none that may start between two 16-byte units: there TMA cannot read it."""
    return slice_step_bytes(value, aval.dtype.itemsize, ctx.module_context.module.operation) % TMA_ALIGN_BYTES == 0


def _aligned(ctx: Any, value: Any, aval: Any) -> Any:
    """Copied where it is not."""
    return value if is_aligned(ctx, value, aval) else barrier(value)


def reshape_aval(aval: Any, shape: tuple[int, ...]) -> Any:
    """Unsharded, but on the same mesh, over whose manual axes it may vary."""
    if aval.shape == shape and aval.sharding.mesh.empty:
        return aval
    if aval.sharding.mesh.empty:
        return aval.update(shape=shape)
    return aval.update(shape=shape, sharding=NamedSharding(aval.sharding.mesh, PartitionSpec(*[None] * len(shape))))


def _emit(ctx: Any, fun: Callable[[Any], Any], value: Any, aval_in: Any, aval_out: Any) -> Any:
    own = ctx.replace(avals_in=[aval_in], avals_out=[aval_out])
    (result,) = mlir.lower_fun(fun, multiple_results=False)(own, value)
    return result
