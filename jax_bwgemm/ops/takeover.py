"""What `lax.dot_general` becomes on CUDA while this package has taken it over: our kernels where these should win.

The primitive stays JAX's, so that differentiation, vmap, checkpoint policies, explicit sharding and cost analysis do.
Products that we do not have are lowered by JAX's own rule, without a word: that is no fallback. A transpose of a
product of ours, as JAX makes it for a weight's gradient, is the product stored the other way round.

JAX hands a rule the values that are there if it is not cached, and such rules must not meet others in one module: so
ours stand for all platforms and hand over to JAX's, which `_rules` keeps; where several platforms meet, by `_plain_p`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jax_bwgemm.facts.contraction import MOST_MODES, Contraction, num_modes, of_dot_general
from jax_bwgemm.facts.epilogue import Epilogue
from jax_bwgemm.facts.legality import why_not_dtypes
from jax_bwgemm.facts.problem import DTYPE_BYTES, FP8_DTYPES
from jax_bwgemm.facts.recipe import buffers
from jax_bwgemm.ops.choices import Refused, note_refused
from jax_bwgemm.ops.lowering import on_cuda, platforms_of
from jax_bwgemm.ops.origins import attribute, custom_call_before, users_line
from jax_bwgemm.ops.partition import told_devices
from jax_bwgemm.ops.precision import why_not_precision
from jax_bwgemm.ops.shape_rules import explicit_sharding, has_partial_sums, viewed
from jax_bwgemm.ops.taking import reshape_aval, reshaped
from jax_bwgemm.runtime import record
from jax_bwgemm.runtime.config import Config, current, report_fallback
from jax_bwgemm.runtime.ffi import TARGET_NAME

_plain_p = Primitive("dot_general")
_rules: dict[Primitive, dict[str | None, Any]] = {}  # JAX's own, by platform; None: all others
_NEEDS = "`_lowerings` and `_platform_specific_lowerings` of jax._src.interpreters.mlir"
_in_block = jax.make_user_context(False)  # part of the key of jit caches: a block traces and lowers anew
_everywhere, _num_users = False, 0
_deterministic: str | None = None  # everywhere; None: what `current` says
_lock = threading.Lock()


@contextlib.contextmanager
def block() -> Iterator[None]:
    """In it, it is taken over, for this thread."""
    _register()
    _count(1)
    try:
        with _in_block(True):
            yield
    finally:
        _count(-1)


def set_everywhere(on: bool, deterministic: str | None = None) -> bool:
    """Outside of blocks too, in all threads. Returns whether nothing has changed."""
    global _everywhere, _deterministic
    if on:
        _register()
    was, before = _everywhere, _deterministic
    _everywhere, _deterministic = on, deterministic
    _count(int(on) - int(was))
    return (was, before) == (on, deterministic)


def is_on() -> bool:
    return bool(_everywhere or _in_block.value)


def _count(change: int) -> None:
    """Who has it taken over. While anybody has, JAX tells the devices of a mesh to `dot_general`, too: that refuses to
    lower for an abstract mesh, of no devices."""
    global _num_users
    with _lock:
        _num_users += change
        (told_devices.add if _num_users else told_devices.discard)(lax.dot_general_p)


def _register() -> None:
    """Our rules, once; they hand over to JAX's while it `is_on` nowhere. RuntimeError where JAX keeps no such rules."""
    with _lock:
        if _rules:
            return
        try:
            from jax._src.interpreters.mlir import _lowerings, _platform_specific_lowerings

            default = {p: _lowerings[p].rule for p in (lax.dot_general_p, lax.transpose_p)}
            specific = [(name, of, p) for name, of in _platform_specific_lowerings.items() for p in default if p in of]
        except (ImportError, AttributeError, KeyError):
            raise RuntimeError(
                f"`install` requires {_NEEDS}, as jax 0.9.2 to 0.12 have them, got jax {jax.__version__}: pass "
                "`jax_bwgemm.dot_general` to your layers instead"
            ) from None
        _rules.update({p: {None: rule} for p, rule in default.items()})
        for name, of, p in specific:
            _rules[p][name] = of.pop(p).rule
        _plain_p.def_abstract_eval(lambda *avals, **params: lax.dot_general_p.abstract_eval(*avals, **params)[0])
        for platform, rule in _rules[lax.dot_general_p].items():
            mlir.register_lowering(_plain_p, rule, platform=platform)
        mlir.register_lowering(lax.dot_general_p, _dot_general_lowering, cacheable=False)
        mlir.register_lowering(lax.transpose_p, _transpose_lowering, cacheable=False)


def _jaxs(ctx: Any, *operands: Any, **params: Any) -> Any:
    rules, platforms = _rules[ctx.primitive], platforms_of(ctx)
    if len(rules) == 1 or len(platforms) == 1:
        return rules.get(platforms[0], rules[None])(ctx, *operands, **params)
    return mlir.lower_fun(lambda *x: _plain_p.bind(*x, **params), multiple_results=False)(ctx, *operands)


def _dot_general_lowering(ctx: Any, lhs: Any, rhs: Any, **params: Any) -> Any:
    made = _ours(ctx, lhs, rhs, **params) if _is_ours_to_lower(ctx) else None
    return _jaxs(ctx, lhs, rhs, **params) if made is None else made


def _transpose_lowering(ctx: Any, operand: Any, *, permutation: Any) -> Any:
    # Of a cotangent: nothing but this transpose reads the product that JAX's rule for a weight's gradient makes.
    is_gradient = _is_ours_to_lower(ctx) and "transpose(" in str(ctx.name_stack)
    made = _stored_transposed(ctx, operand, tuple(permutation)) if is_gradient else None
    return _jaxs(ctx, operand, permutation=permutation) if made is None else made


def _is_ours_to_lower(ctx: Any) -> bool:
    return is_on() and platforms_of(ctx) == ["cuda"]


def _ours(ctx: Any, lhs: Any, rhs: Any, *, dimension_numbers: Any, precision: Any, **_: Any) -> Any | None:
    """None if it is XLA's."""
    a, b = ctx.avals_in
    if current().is_emulated or num_modes(a.ndim, b.ndim, dimension_numbers) > MOST_MODES:
        return None
    reason = _why_not_ours(ctx)
    if reason and not _settings().is_batch_invariant:
        return None
    return _lowered(ctx, (lhs, rhs), of_dot_general(a.ndim, b.ndim, dimension_numbers), precision, reason)


def _why_not_ours(ctx: Any) -> str | None:
    (out,) = ctx.avals_out
    if str(out.dtype) in FP8_DTYPES:
        return "a float8 result of ours saturates, and JAX's does not"
    if any(has_partial_sums(x.sharding) for x in (*ctx.avals_in, out)):
        return "our products know no `unreduced` and `reduced` mesh axes"
    return None


def _settings() -> Config:
    if _deterministic is None:
        return current()
    return dataclasses.replace(current(), deterministic=_deterministic)


def deterministic() -> str:
    """What is asked of the bits of a `lax.dot_general` here; where it is not taken over, of our own products."""
    return (_settings() if is_on() else current()).deterministic


def _lowered(
    ctx: Any, operands: Sequence[Any], contraction: Contraction, precision: Any = None, refused: str | None = None
) -> Any | None:
    """What is XLA's is so without a word, but where that breaks what was asked of the bits."""
    settings = _settings()
    is_invariant = settings.is_batch_invariant
    params: dict[str, Any] = {
        "contraction": contraction,
        "out_dtype": ctx.avals_out[0].dtype,
        "epilogue": Epilogue(),
        "precision": precision,
        "tile": None,
        "out_sharding": explicit_sharding(ctx.avals_out[0]),  # as JAX has typed it
        "settings": dataclasses.replace(settings, on_fallback="ignore"),
    }
    problem = viewed(ctx.avals_in, **params)[1]
    made: Any = refused or why_not_dtypes(problem) or why_not_precision(precision, problem.a_dtype)
    made = on_cuda(ctx, operands, params, moves=is_invariant) if made is None else Refused(problem, made)
    if not isinstance(made, Refused):
        return made
    note_refused(made)
    if is_invariant and not made.problem.is_empty:
        report_fallback(settings.on_fallback, str(made.problem), settings.why_aloud(made.reason), users_line())
    return None


def _stored_transposed(ctx: Any, operand: Any, permutation: tuple[int, ...]) -> Any | None:
    """The product of ours that `operand` is, stored as its transpose: nobody reads the first one then, and XLA drops
    it. None where it is none; or not of two matrices as they lie, whose rows and columns change places."""
    call = custom_call_before(operand, TARGET_NAME)
    if call is None or list(operand.uses):
        return None
    a, b, *others = buffers(attribute(call, "buffers"))
    out = next(buffer for buffer in others if buffer.is_result)
    is_plain = others[0] == out and re.search("_identity(_|$)", attribute(call, "variant"))
    if not is_plain or DTYPE_BYTES[a.dtype] == 1:  # whose sums may be promoted
        return None
    values, shape = list(call.operands), operand.type.shape
    if any(size < 0 for value in values for size in value.type.shape):  # symbols, which a type does not tell apart
        return None
    sizes: dict[str, int] = {}
    for buffer, value in ((a, values[0]), (b, values[1]), (out, call.results[0])):
        for dim, size in zip(buffer.dims, value.type.shape, strict=True):
            if sizes.setdefault(dim[0], size) != size:  # padded
                return None
    _, slow, fast = (dim[0] for dim in out.dims)
    num = permutation[0]
    is_rotation = permutation == (*range(num, len(shape)), *range(num))
    if sizes["l"] != 1 or not is_rotation or math.prod(shape[:num]) != sizes[slow]:
        return None
    a_modes, b_modes = ("".join(dim[0] for dim in buffer.dims) for buffer in (a, b))
    avals = [
        reshape_aval(ctx.avals_in[0], tuple(x.type.shape)).update(dtype=jnp.dtype(y.dtype))
        for x, y in zip(values, (a, b), strict=False)
    ]
    whole = reshape_aval(ctx.avals_out[0], (1, sizes[fast], sizes[slow]))
    own = ctx.replace(avals_in=avals, avals_out=[whole])
    made = _lowered(own, values[:2], Contraction(a_modes, b_modes, f"l{fast}{slow}"))
    if made is None:
        return None
    record.drop(attribute(call, "variant"))
    return [reshaped(made[0], ctx.avals_out[0].shape)]
