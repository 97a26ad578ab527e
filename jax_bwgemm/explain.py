"""`explain`: which kernel a `matmul` would run and why, or those of a whole function, as text, on any machine. Runs and
compiles nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, overload

import jax

from jax_bwgemm.contract import why_not_ours
from jax_bwgemm.facts.geometry import concurrent_clusters, num_tiles
from jax_bwgemm.facts.padding import is_padded_together, is_tma_storable, padded_shape, padding
from jax_bwgemm.facts.problem import DTYPE_BYTES, Problem
from jax_bwgemm.facts.resources import reads_a_from_registers, workspace_bytes
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.matmul import as_array, checked_params, is_weak, of_one_dtype, posed
from jax_bwgemm.ops import takeover
from jax_bwgemm.ops.shape_rules import matmul_shape
from jax_bwgemm.planner.candidates import Candidate
from jax_bwgemm.planner.choice import SURE_CLUSTER_CTAS
from jax_bwgemm.planner.cost import repack_us
from jax_bwgemm.planner.measured import Record
from jax_bwgemm.planner.plan import Plan
from jax_bwgemm.planner.routes import Route
from jax_bwgemm.planner.streams import NO_STREAM
from jax_bwgemm.runtime import record
from jax_bwgemm.runtime.attempts import expected
from jax_bwgemm.runtime.config import config, resolve
from jax_bwgemm.runtime.decision import find_repack
from jax_bwgemm.runtime.record import Product
from jax_bwgemm.runtime.rungs import Asked


@dataclasses.dataclass(frozen=True)
class Explanation:
    """`plan` is None without a device to plan for; `variant` is None if XLA takes over, and `reason` then says why.

    With a variant, `reason` says why only the product is its: alone, in float32, and the epilogue is XLA's.
    `emulate` is the target whose kernels run in the emulator, or "off". `repacks` says which operands are rewritten
    first, and by what. `is_compiled_first`: the kernel is not at hand, but its compiler is. `deterministic`: what was
    asked of the bits. With several `parts` of k, plan and variant are of their batch, and XLA adds them up.
    """

    problem: Problem
    plan: Plan | None = None
    variant: str | None = None
    reason: str | None = None
    emulate: str = "off"
    repacks: tuple[str, ...] = ()
    is_compiled_first: bool = False
    deterministic: str = "run"
    parts: int = 1

    def __str__(self) -> str:
        size = f"{self.problem.flops / 1e9:.4g} GFLOP, {self.problem.min_bytes / 1e6:.4g} MB"
        candidates = _candidate_lines(self.plan) if self.plan else []
        return "\n".join([f"{self.problem} ({size})", *candidates, *self._verdict(), *self._bits()])

    def _bits(self) -> list[str]:
        if self.deterministic != "batch":
            return []
        if self.variant is None:
            return ['  bits:  depend on the batch, for they are XLA\'s: `deterministic="batch"` does not hold']
        excluded = [c for c in (self.plan.candidates if self.plan else ()) if "`deterministic" in (c.reason or "")]
        tiles = f"{len(excluded)} of {len(self.plan.candidates) if self.plan else 0} tiles are left out for it"
        return [f'  bits:  a row has the same in any batch, as `deterministic="batch"` asks; {tiles}']

    def _verdict(self) -> list[str]:
        if self.variant is None:
            return [f"runs XLA's dot_general, because {self.reason}"]
        if self.emulate != "off":
            where = f"in the emulator of {self.emulate}; on CUDA `emulate` is refused"
        elif self.is_compiled_first:
            where = "which is compiled first, once, in some seconds"
        else:
            where = "whose cubin is present"
        lines = [f"runs {self.variant}, {where}", *_choice_lines(self.plan)]
        lines += [f"  first: {repack}" for repack in self.repacks]
        if self.parts > 1:
            lines.append(f"  parts:  {self.reason}")
        elif self.reason:
            lines.append(f"  XLA:   the epilogue, {self.problem.epilogue.kind} of a float32 product: {self.reason}")
        return lines


@dataclasses.dataclass(frozen=True)
class FunctionExplanation:
    """The products of a function, in the order in which they are lowered; one in the body of a loop counts once, as in
    XLA's cost analysis. Of a program over a mesh they are those of all devices together. Among them, with `is_beside`,
    stands what else is left to XLA: an epilogue that no kernel has, an einsum that is no product.

    `flops`: of all products, XLA's too, two for each pair of elements that are multiplied. `min_bytes`: of device
    memory, if each of them reads every operand once and writes every result once. Of symbolic sizes both are symbols.
    """

    products: tuple[Product, ...]
    deterministic: str = "run"

    @property
    def flops(self) -> int:
        return sum(product.flops for product in self.products)

    @property
    def min_bytes(self) -> int:
        return sum(product.min_bytes for product in self.products)

    def __str__(self) -> str:
        total = sum(product.us for product in self.products)
        num = sum(product.kernel is not None for product in self.products)
        num_all = sum(not product.is_beside for product in self.products)
        lines = [f"products: {num_all}, {num} of them by our kernels, predicted to take {total:.1f} us"]
        lines[0] += f" ({_scaled(self.flops, 'G', 1e9)}FLOP, {_scaled(self.min_bytes, 'M', 1e6)}B)"
        if self.deterministic == "batch":
            lines[0] += ', under deterministic="batch", which holds for these'
        for product in self.products:
            where = f"{product.where}: " if product.where else ""
            if product.kernel is None:
                lines.append(f"  {where}{product.problem}: XLA's, because {product.reason}")
                continue
            share = f"{product.us:.1f} us, {100 * product.us / total:.0f} %" if total else ""
            notes = "".join(f"; {note}" for note in product.notes)
            epilogue = f"; XLA has the epilogue: {product.reason}" if product.reason else ""
            lines.append(f"  {where}{product.problem}: {product.kernel}, {share}{notes}{epilogue}")
        return "\n".join(lines)


def _scaled(amount: int, prefix: str, unit: float) -> str:
    """With an SI prefix, but of symbols as it is."""
    return f"{amount / unit:.4g} {prefix}" if isinstance(amount, int) else f"{amount} "


_OF_ARRAYS = (
    "out_dtype", "alpha", "bias", "activation", "residual", "precision", "out_sharding", "tile", "on_fallback",
    "device", "emulate", "deterministic",
)  # fmt: skip


@overload
def explain(f: Callable[..., Any], /, *args: Any, device: str | None = None) -> FunctionExplanation: ...
@overload
def explain(
    a: Any,
    b: Any,
    /,
    *,
    out_dtype: Any = None,
    alpha: float = 1.0,
    bias: Any = None,
    activation: str | None = None,
    residual: Any = None,
    precision: Any = None,
    tile: Tile | str | None = None,
    on_fallback: str | None = None,
    device: str | None = None,
    emulate: str | None = None,
    deterministic: str | None = None,
) -> Explanation: ...
def explain(a: Any, /, *args: Any, device: str | None = None, **settings: Any) -> Explanation | FunctionExplanation:
    """What `matmul` of two arrays would run on a GPU, or in the emulator, and why; or what all products of a function
    would: print it. Runs and compiles nothing.

    Args:
      a: array, tracer or `jax.ShapeDtypeStruct`, of which only shape and dtype are read; or a function, such as
        `jax.grad(loss)`, of which every product is explained: those of `matmul`, `dot_general` and the layers, and
        after `install` all others.
      *args: b, like a; or what the function is called with, arrays or `jax.ShapeDtypeStruct`.
      device: "h100", "h200", "b200" or "b300"; None for the `config`'s, else the CUDA device of this process.
      **settings: of two arrays: out_dtype, alpha, bias, activation, residual, precision, tile, on_fallback,
        emulate and deterministic, as for `matmul`.

    Returns:
      An `Explanation`; its `str` shows the problem, each candidate tile with its predicted time or the reason why it
      is out, what was chosen and why, or which fallback runs and why. Of a function a `FunctionExplanation`: for each
      product the user's line, the kernel and its share of the predicted time, or why it is XLA's, and which operands
      are transposed, padded or moved first; and the FLOPs and bytes of each and of all, for XLA's cost analysis knows
      none of a custom call. A product that is XLA's on any device, as for its dtypes or its `precision`, is one where
      it was written: what JAX makes of it, its gradients and a batch under vmap, is not seen.

    Raises:
      ValueError, TypeError: as `matmul`, or what the function raises.

    Example:
      >>> x = jax.ShapeDtypeStruct((8192, 8192), jnp.bfloat16)
      >>> print(jax_bwgemm.explain(x, x, device="b200"))
      >>> print(jax_bwgemm.explain(jax.grad(loss), params, batch, device="h200"))
    """
    if callable(a):
        if settings:
            raise TypeError(f"`explain` of a function requires its arguments and `device` only, got {[*settings]}")
        return _explain_function(a, args, device)
    if len(args) != 1:
        got = f"{1 + len(args)} arrays" if args else "one array"
        raise TypeError(f"`explain` requires two arrays, or a function and its arguments, got {got}")
    if unknown := settings.keys() - _OF_ARRAYS:
        rule = f"`explain` of two arrays requires settings out of {', '.join(_OF_ARRAYS)}"
        remedy = "explain a function, as in explain(lambda a, b: matmul(a, b, epilogue=...), a, b)"
        raise TypeError(f"{rule}, got {', '.join(sorted(unknown))}: {remedy}")
    return _explain_matmul(a, args[0], device=device, **settings)


_anew = jax.make_user_context(None)  # part of the key of jit caches: what is refused is noted in a trace, each time


def _explain_function(f: Callable[..., Any], args: Sequence[Any], device: str | None) -> FunctionExplanation:
    def fresh(*args: Any) -> Any:  # of a function that was lowered before, nothing would be noted
        return f(*args)

    with config(device=device, on_fallback="ignore"), _anew(object()), record.listed(runs=False) as products:
        jax.jit(fresh).trace(*args).lower(lowering_platforms=("cuda",))
    return FunctionExplanation(tuple(products), takeover.deterministic())


def _explain_matmul(
    a: Any,
    b: Any,
    *,
    bias: Any = None,
    residual: Any = None,
    on_fallback: str | None = None,
    device: str | None = None,
    emulate: str | None = None,
    deterministic: str | None = None,
    **chosen: Any,
) -> Explanation:
    a, b = (x if isinstance(x, jax.ShapeDtypeStruct) else as_array(name, x) for name, x in (("a", a), ("b", b)))
    a, b = of_one_dtype(*(jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=is_weak(x)) for x in (a, b)))
    matmul_shape(a.shape, b.shape)
    params = checked_params(a, b, bias=bias, residual=residual, **chosen)
    problem = posed((a, b, *(x for x in (bias, residual) if x is not None)), params)
    if not problem.is_static:
        raise ValueError(
            f"`explain` of two arrays requires sizes that are known, got {problem}: explain a function, of which it "
            "says the kernels of each part of a range"
        )
    settings = resolve(on_fallback, device, emulate, deterministic=deterministic)
    if reason := why_not_ours(problem, params["precision"]):
        return Explanation(problem, reason=reason, deterministic=settings.deterministic)
    compiles = settings.compile_missing == "auto"
    planned = settings.planned_device, params["tile"], settings.emulate, compiles, settings.deterministic
    return explain_problem(problem, *planned)


def explain_problem(
    problem: Problem,
    device: str | None,
    tile: Tile | None = None,
    emulate: str = "off",
    compiles: bool = False,
    deterministic: str = "run",
) -> Explanation:
    """What runs `problem`: a kernel, one that computes the product alone with XLA's epilogue, or XLA.

    Raises ValueError if `tile` can compute neither.
    """
    is_invariant = deterministic == "batch"
    found = expected(Asked(problem, device, tile, emulate != "off", compiles, batch_invariant=is_invariant))
    plan = found.plan
    if plan is None or plan.variant is None or (found.entry is None and not found.is_missing):
        return Explanation(problem, plan, None, found.reason, emulate, deterministic=deterministic)
    repacks = _repacks(found.route, plan, device, emulate != "off")
    reason = None if found.is_fused else found.reason
    how = emulate, repacks, found.is_missing, deterministic, found.parts
    return Explanation(problem, plan, plan.variant.name, reason, *how)


def _repacks(route: Route, plan: Plan, device: str | None, is_emulated: bool) -> tuple[str, ...]:
    """One line for each operand that the kernel gets in another form than it was given in."""
    own, lines = route.problem, []
    for i, x in enumerate("ab"):
        if not route.padding(i) and not route.transposes[i]:
            continue
        kind = "transpose" if route.transposes[i] else "pad"
        entry = find_repack(kind, DTYPE_BYTES[own.a_dtype], padded_shape(own, x), device, is_emulated)
        by = entry.name if entry else "XLA"
        if kind == "transpose":
            major, us = getattr(own, f"{x}_major"), repack_us(own, x, plan.arch)
            was = {"a": "m", "b": "n"}[x]
            lines.append(f"{x} from {was}-major to {major}-major by {by}, predicted as {us:.1f} us on top")
        else:
            one = " in one launch with the other operand" if is_padded_together(own) else ""
            lines.append(f"{x} padded by {by}" + (f"{one}, or by XLA together with what makes it" if entry else ""))
    return tuple(lines)


def _candidate_lines(plan: Plan) -> list[str]:
    width = max(len(_name(candidate)) for candidate in plan.candidates)
    measured = f" {'measured':>12}" if plan.record else ""
    head = f"{'on ' + plan.arch.name:<{width + 3}}{measured} {'predicted':>12} {'of peak':>8} {'waves':>6}  bound by"
    return [head, *(_candidate_line(candidate, plan, width) for candidate in plan.candidates)]


def _candidate_line(candidate: Candidate, plan: Plan, width: int) -> str:
    mark = "->" if candidate is plan.chosen else "  "
    line = f"{mark} {_name(candidate):<{width}}"
    if plan.record and candidate.cost:
        line += " " * 13 if candidate.measured_us is None else f" {candidate.measured_us:9.1f} us"
    if c := candidate.cost:
        line += f" {c.us:9.1f} us {100 * c.utilisation:6.1f} % {c.waves:6d}  {c.bound:<12}"
        return (line + ("  cubin not available" if candidate.reason else "")).rstrip()
    return line + f"  out: {candidate.reason}"


def _name(candidate: Candidate) -> str:
    return f"{candidate.tile} swapped" if candidate.swapped else str(candidate.tile)


def _choice_lines(plan: Plan | None) -> list[str]:
    if plan is None or plan.tile is None or plan.chosen is None:
        return []
    along = "columns" if plan.raster_along_n else "rows"
    reason = (
        "measured to be faster than the planner's"
        if plan.chosen.order
        else "so that concurrent ones share the L2 cache"
    )
    order = f"groups of {plan.raster_group} {along} of cluster tiles, {reason}"
    if plan.raster_order == "snake":
        order += "; every second group backwards"
    if plan.tile.direct:
        order = "a CTA for each tile, all at once"
    lines = {
        "tile": _why_tile(plan, plan.chosen),
        "pairs": _why_cta_group(plan, plan.chosen),
        "swap": _why_swapped(plan.problem, plan.tile, plan.arch.target) if plan.swapped else "",
        "split": _why_split(plan.tile) if plan.tile.cluster_k > 1 else "",
        "stream": _why_stream(plan, plan.tile) if plan.tile.stream_k else "",
        "order": order,
        "L2": "" if plan.tile.direct else _why_hints(plan),
        "loads": _why_loads(plan.tile),
        "store": _why_store(plan.problem, plan.tile),
        "pad": _why_padding(plan, plan.chosen),
    }
    return [f"  {what + ':':<7} {why}" for what, why in lines.items() if why]


def _why_tile(plan: Plan, chosen: Candidate) -> str:
    if plan.record and chosen.measured_us is not None:
        return _why_measured(plan, plan.record, chosen.measured_us)
    mine = chosen.cost
    rivals = [(c.cost.us, c) for c in plan.candidates if c.cost and c is not chosen]
    if mine is None or not rivals:
        return "the only candidate"
    us, best = min(rivals, key=lambda rival: rival[0])
    if us >= mine.us:
        return f"predicted to be the fastest, {us - mine.us:.1f} us before {_name(best)}"
    if best.reason is None and best.tile.cluster_ctas > SURE_CLUSTER_CTAS >= chosen.tile.cluster_ctas:
        return f"as fast as {_name(best)} within the model's error, whose clusters may leave SMs empty"
    if best.reason is None:
        return f"as fast as {_name(best)} within the model's error, and reads less from the L2 cache"
    return f"the best whose cubin is available; {_name(best)} would be {mine.us - us:.1f} us faster"


def _why_measured(plan: Plan, record: Record, mine_us: float) -> str:
    """The candidates are in order: the chosen one, then what was measured and can be launched."""
    rival = plan.candidates[1] if len(plan.candidates) > 1 else None
    xlas = "" if record.xla_us is None else f"; XLA took {record.xla_us:.1f} us"
    when = f"{xlas} ({record.date}, {record.problem})"
    if rival is None or rival.measured_us is None or rival.reason is not None:
        return f"the only one that was measured{when}"
    return f"measured to be the fastest, {rival.measured_us - mine_us:.1f} us before {_name(rival)}{when}"


def _why_cta_group(plan: Plan, chosen: Candidate) -> str:
    tile = chosen.tile
    if plan.arch.tmem_cols == 0:
        return "1-CTA; pairs came with Blackwell"
    others = [c for c in plan.candidates if c.cost and c.tile.cta_group != tile.cta_group]
    other = f"; {_demand(others[0])}" if others else ""
    if tile.cta_group == 1:
        return f"1-CTA; no pair is predicted to be faster here: {_demand(chosen)}{other}"
    kib = tile.load_n * tile.k_tile * DTYPE_BYTES[plan.problem.b_dtype] / 1024
    halves = f"2-CTA; each CTA of a pair loads half of B ({kib:g} KiB a stage) and one instruction feeds both"
    return f"{halves}: {_demand(chosen)}{other}"


def _demand(candidate: Candidate) -> str:
    cost = candidate.cost
    assert cost is not None  # the caller has a legal one
    need = f"{_name(candidate)} needs {cost.fill_rate:.0f} B/clk a CTA beside MMAs of {cost.mma_interval:g} cycles"
    return f"{need} ({cost.us:.1f} us at {cost.clock_ghz:.2f} GHz)"


def _why_swapped(problem: Problem, tile: Tile, target: str) -> str:
    """`problem` is the transposed one: what was asked has its n as rows."""
    if reads_a_from_registers(problem.a_dtype, problem.a_major, target):
        return f"computes C^T = B^T A^T: wgmma takes an n-major {problem.a_dtype} b as its A only, from registers"
    filled = 100 * problem.n / (-(-problem.n // tile.mma_n) * tile.mma_n)
    return (
        f"computes C^T = B^T A^T: {problem.n} rows of C as columns fill {filled:.0f} % of the tiles' width; "
        f"as rows, {100 * problem.n / (-(-problem.n // 64) * 64):.0f} % of the MMAs of 64"
    )


def _why_split(tile: Tile) -> str:
    return f"{tile.cluster_k} CTAs of a cluster divide k and add their float32 parts in the order of their ranks"


def _why_stream(plan: Plan, tile: Tile) -> str:
    tiles, clusters = num_tiles(tile, plan.problem), concurrent_clusters(tile, plan.arch)
    if plan.stream == NO_STREAM:
        return f"none of the {tiles} cluster tiles is divided along k: no parts are predicted to gain"
    return (
        f"the last {plan.stream.tiles} of {tiles} cluster tiles are divided along k between {plan.stream.clusters} of "
        f"{clusters} clusters, which meet in {workspace_bytes(tile, clusters) / 1e6:.1f} MB of workspace, in the order "
        "of k"
    )


def _why_hints(plan: Plan) -> str:
    """In terms of the caller's operands."""
    hints = (plan.b_l2, plan.a_l2) if plan.swapped else (plan.a_l2, plan.b_l2)
    why = {"evict_first": " (a stream, most of all bytes)"}
    found = [f"{name} {hint}{why.get(hint, '')}" for name, hint in zip("ab", hints, strict=True)]
    if plan.c_l2 == "normal":
        return ", ".join(found)
    return ", ".join([*found, f"the result {plan.c_l2} (it does not fit)"])


def _why_loads(tile: Tile) -> str:
    if tile.is_thin:
        return "by threads, into registers: a large matrix is read once, in the aligned 16 bytes that hold its lines"
    return "by threads, which wait for no descriptor and no barrier, of any rows" if tile.direct else ""


def _why_store(problem: Problem, tile: Tile) -> str:
    if tile.direct:
        return "by threads, as registers have the result: a small one is sooner there than through shared memory"
    if tile.by_rows:
        return "by warps, in rows that are longer than TMA's: rows of the result end within sectors of 32 bytes"
    if is_tma_storable(problem):
        return "TMA, box after box from shared memory"
    is_n_major = problem.c_major == "n"
    size = (problem.n if is_n_major else problem.m) * DTYPE_BYTES[problem.out_dtype]
    how = "mostly 16 bytes at a time" if is_n_major else "element by element"
    return f"by threads, {how}: TMA steps over rows of a multiple of 16 bytes, and these have {size}"


def _why_padding(plan: Plan, chosen: Candidate) -> str:
    names = zip("ab", "ba" if plan.swapped else "ab", strict=True)
    if chosen.tile.direct:
        return ""
    padded = [f"{mine} by {by} elements a row" for x, mine in names if (by := padding(plan.problem, x))]
    if not padded or chosen.cost is None:
        return ""
    return f"{' and '.join(padded)}, predicted as {chosen.cost.padding_us:.1f} us: TMA steps over multiples of 16 bytes"
