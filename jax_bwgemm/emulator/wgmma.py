"""wgmma: each warp of a warpgroup multiplies its 16 rows of A by all of B; accumulators stay in registers.

Agrees bit for bit with an H200 (driver 580, 2026-11) where sums are exact: every major, swizzle, type and fragment. On
other sums hardware keeps fewer bits: partial sums are truncated, of 8-bit floats to about 2^-12 of the largest.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from typing import Any

import numpy as np

from jax_bwgemm.emulator.decode import Decoder, Effect, handles, whole_warp
from jax_bwgemm.emulator.descriptors import ELEMENT_BYTES, operand_chunks, operand_matrix, sums_of_products
from jax_bwgemm.emulator.engine import AsyncOp
from jax_bwgemm.emulator.syntax import Imm, Instr, Vec
from jax_bwgemm.emulator.values import IN_FLIGHT, UNDEFINED

Key = tuple[int, ...]
_TOGETHER = (("bf16",), ("f16",), ("tf32",), ("e4m3", "e5m2"), ("s8", "u8"))  # types that A and B may have together
_INT_COLS = (8, 16, 24, *range(32, 257, 16))


@dataclasses.dataclass
class _Mma:
    """One issued wgmma of one warp: its chunks of A and B (and B's descriptor), and whether it adds to D.

    `a` holds words instead of chunk numbers if A came from registers (`form.a_in_registers`): from `sources`, slots and
    what was in them.
    """

    key: Key
    a: np.ndarray
    b: np.ndarray
    b_descriptor: int
    accumulate: bool
    form: _Form
    where: Any
    sources: list[tuple[int, Any]]


@dataclasses.dataclass(frozen=True)
class _Form:
    n: int
    a: str
    b: str
    integer: bool
    a_mn: bool
    b_mn: bool
    negate: bool
    a_in_registers: bool = False
    saturate: bool = False


class WgmmaState:
    """What one warp has under way. `sums` holds the accumulators as (16, n) matrices while registers do not."""

    def __init__(self) -> None:
        self.fenced = False
        self.at_fence: list[Any] = []  # all registers at the last wgmma.fence
        self.open: list[_Mma] = []
        self.groups: list[AsyncOp] = []
        self.batches: list[list[_Mma]] = []  # of the groups
        self.sums: dict[Key, np.ndarray] = {}
        self.rows: dict[Key, list[Any]] = {}  # the register values last delivered


def _state(w: Any) -> WgmmaState:
    if w.wgmma is None:
        w.wgmma = WgmmaState()
    return w.wgmma


def to_registers(matrix: np.ndarray) -> np.ndarray:
    """(16, n) -> (registers, threads): j of t is row t/4 + 8*(j/2%2), column 8*(j/4) + 2*(t%4) + j%2 (PTX ISA)."""
    n = matrix.shape[1]
    parts = matrix.reshape(2, 8, n // 8, 4, 2).transpose(2, 0, 4, 1, 3)
    return np.ascontiguousarray(parts).reshape(n // 2, 32)


def from_registers(registers: np.ndarray) -> np.ndarray:
    """The inverse of `to_registers`."""
    n = 2 * registers.shape[0]
    parts = registers.reshape(n // 8, 2, 2, 8, 4).transpose(1, 3, 0, 4, 2)
    return np.ascontiguousarray(parts).reshape(16, n)


@handles("wgmma.fence")
def _fence(d: Decoder, instr: Instr, mods: list[str]) -> Effect:
    d.only(mods, "sync", "aligned")

    @whole_warp
    def run(w: Any) -> int | None:
        state = _state(w)
        state.fenced, state.at_fence = True, w.regs.copy()
        return None

    return Effect(run)


def _form(d: Decoder, mods: list[str], flags: list[int], a_in_registers: bool) -> _Form:
    saturate = mods[3:4] == ["satfinite"]
    if saturate:
        mods = mods[:3] + mods[4:]
    shape = re.fullmatch(r"m64n(\d+)k(\d+)", mods[2])
    if mods[:2] != ["sync", "aligned"] or shape is None or len(mods) < 6:
        raise d.unsupported("requires .sync.aligned.shape{.satfinite}.dtype.atype.btype")
    n, k, dtype, a, b = int(shape.group(1)), int(shape.group(2)), *mods[3:6]
    integer = dtype == "s32"
    together = next((kinds for kinds in _TOGETHER if a in kinds), ())
    if b not in together or dtype != ("s32" if "s8" in together else "f32") or k * ELEMENT_BYTES[a] != 32:
        raise d.unsupported("unknown types or shape")
    d.only(mods[6:])
    if saturate and not integer:
        raise d.unsupported("requires integers for .satfinite")
    columns = _INT_COLS if integer else range(8, 257, 8)
    if n not in columns:
        raise d.unsupported(f"requires N among {list(columns)}")
    if len(flags) not in ((0,) if integer else (2, 4 - a_in_registers) if ELEMENT_BYTES[a] == 2 else (2,)):
        raise d.unsupported("requires scales unless integer, and majors for 16-bit types only")
    if not integer and any(f not in (1, -1) for f in flags[:2]):
        raise d.unsupported("requires scales of 1 or -1")
    majors = [0] * a_in_registers + flags[2:] + [0, 0]
    negate = not integer and flags[0] * flags[1] < 0
    return _Form(n, a, b, integer, bool(majors[0]), bool(majors[1]), negate, a_in_registers, saturate)


@handles("wgmma.mma_async")
def _mma(d: Decoder, instr: Instr, mods: list[str]) -> Effect:
    """`{d}, a-desc | {a}, b-desc, p{, scale-a, scale-b{, a-mn, b-mn}}`; no a-mn for A in registers."""
    flags = [o.value for o in instr.operands[4:] if isinstance(o, Imm)]
    form = _form(d, mods, flags, isinstance(instr.operands[1], Vec))
    key = tuple(d.dest(o) for o in d.items(instr.operands[0]))
    if len(key) != form.n // 2 or len(flags) != len(instr.operands) - 4:
        raise d.unsupported(f"requires {form.n // 2} accumulators and immediate scales")
    a_slots = [d.src(o, 32 if form.a_in_registers else 64) for o in d.items(instr.operands[1])]
    if form.a_in_registers and len(a_slots) != 4:
        raise d.unsupported("requires 4 registers of A")
    b_slot, p_slot = d.src(instr.operands[2], 64), d.src(instr.operands[3], 1)

    @whole_warp
    def run(w: Any) -> int | None:
        state = _state(w)
        accumulate = bool(w.uniform(p_slot))
        _take_registers(w, state, key, accumulate)
        sources = _a_sources(w, state, a_slots) if form.a_in_registers else []
        if sources:
            w.meet_reads()
        a = (
            a_words(columns_of([value for _, value in sources]))
            if sources
            else _a_chunks(w, form, w.uniform(a_slots[0]))
        )
        b_descriptor = w.uniform(b_slot)
        b = operand_chunks(w, w.cta, b_descriptor, form.n, ELEMENT_BYTES[form.b], form.b_mn, False)
        state.open.append(_Mma(key, a, b, b_descriptor, accumulate, form, w.where(), sources))
        if w.index % 4 == 0:  # one instruction of a warpgroup
            w.cta.cluster.machine.counters.mma(w.cta.rank_in_grid)
        return None

    return Effect(run, tuple((slot, 32) for slot in key))


def _a_chunks(w: Any, form: _Form, descriptor: int) -> np.ndarray:
    """The warp's 16 of the 64 rows."""
    chunks = operand_chunks(w, w.cta, descriptor, 64, ELEMENT_BYTES[form.a], form.a_mn, False)
    width = chunks.shape[1 if form.a_mn else 0] // 4
    own = slice(w.index % 4 * width, (w.index % 4 + 1) * width)
    return chunks[:, own] if form.a_mn else chunks[own]


def _a_sources(w: Any, state: WgmmaState, slots: list[int]) -> list[tuple[int, Any]]:
    """A's registers, as they were at the last fence."""
    sources = [(slot, w.value(slot)) for slot in slots]
    if not state.at_fence or any(state.at_fence[slot] is not value for slot, value in sources):
        raise w.fault("missing-wgmma-fence", "registers of A are written and used by wgmma without wgmma.fence")
    return sources


def columns_of(values: list[Any]) -> np.ndarray:
    """(registers, threads)."""
    words = np.empty((len(values), 32), np.uint32)
    for i, value in enumerate(values):
        words[i] = value
    return words


def a_words(words: np.ndarray) -> np.ndarray:
    """(16 rows, 8 words): register i of thread t is row t/4 + 8*(i%2), word t%4 + 4*(i/2) (PTX ISA, matrix A)."""
    return np.ascontiguousarray(words.reshape(2, 2, 8, 4).transpose(1, 2, 0, 3)).reshape(16, 8)


def _take_registers(w: Any, state: WgmmaState, key: Key, accumulate: bool) -> None:
    """Accumulators pass from registers to the state, unless they are there already."""
    regs = w.regs
    if regs[key[0]] is IN_FLIGHT and key in state.sums:
        return
    delivered = state.rows.get(key)
    untouched = delivered is not None and all(regs[s] is v for s, v in zip(key, delivered, strict=True))
    if not untouched and not state.fenced:
        raise w.fault("missing-wgmma-fence", "accumulator registers are used by wgmma without wgmma.fence")
    if not untouched:
        columns = np.empty((len(key), 32), np.uint32)
        for i, slot in enumerate(key):
            if accumulate or regs[slot] is not UNDEFINED:
                columns[i] = regs[slot]
        state.sums[key] = from_registers(columns)
    for slot in key:
        regs[slot] = IN_FLIGHT


@handles("wgmma.commit_group")
def _commit(d: Decoder, instr: Instr, mods: list[str]) -> Effect:
    d.only(mods, "sync", "aligned")

    @whole_warp
    def run(w: Any) -> int | None:
        state = _state(w)
        batch, state.open = state.open, []
        op = w.cta.cluster.new_op(w, "mma", lambda: _finish(w.cta, state, batch), {w.cta})
        _note(w, op, batch)
        before = state.groups[-1:]
        state.groups.append(op)
        state.batches.append(batch)
        w.cta.cluster.engine.issue(op, before)
        return None

    return Effect(run)


def _note(w: Any, op: AsyncOp, batch: list[_Mma]) -> None:
    tracker = w.cta.cluster.tracker
    if not batch or not tracker.enabled:
        return
    number = tracker.event(w.gid, 0, op.bit, batch[0].where)
    pieces = [mma.b.ravel() for mma in batch] + [mma.a.ravel() for mma in batch if not mma.form.a_in_registers]
    chunks = np.concatenate(pieces)
    tracker.read(w.cta.shadow, chunks, number, op.clock, ("wgmma", w.gid), True)


def _joint(cta: Any, chunks: list[np.ndarray], kind: str, mn_major: bool) -> np.ndarray:
    """The operands of a run of MMAs side by side along K: (rows, k)."""
    if mn_major:
        return operand_matrix(cta.chunks[np.concatenate(chunks, axis=0)], kind, True)
    return operand_matrix(cta.chunks[np.concatenate(chunks, axis=1)], kind, False)


def _joint_a(cta: Any, run: list[_Mma]) -> np.ndarray:
    form = run[0].form
    if form.a_in_registers:
        return operand_matrix(np.concatenate([mma.a for mma in run], axis=1), form.a, False)
    return _joint(cta, [mma.a for mma in run], form.a, form.a_mn)


def _joint_b(cta: Any, run: list[_Mma]) -> np.ndarray:
    """B is the same for the four warps of a warpgroup: kept until shared memory changes."""
    cache: dict[Any, Any] = cta.operand_cache
    form = run[0].form
    key = (form, *(mma.b_descriptor for mma in run))
    found = cache.get(key)
    if found is None or found[0] != cta.version:
        if len(cache) > 16:
            cache.clear()
        matrix = _joint(cta, [mma.b for mma in run], form.b, form.b_mn).astype(np.float64)
        found = cache[key] = (cta.version, matrix)
    return found[1]


def _finish(cta: Any, state: WgmmaState, batch: list[_Mma]) -> None:
    """Runs of MMAs with one accumulator are one product over their joint K."""
    start = 0
    while start < len(batch):
        first = batch[start]
        stop = start + 1
        while stop < len(batch) and _continues(batch[stop], first):
            stop += 1
        run = batch[start:stop]
        product = sums_of_products(_joint_a(cta, run), _joint_b(cta, run), first.form.integer)
        if first.form.negate:
            product = 0 - product  # a sum of zeros is +0
        _add(state, first, product)
        start = stop


def _continues(mma: _Mma, first: _Mma) -> bool:
    return mma.key == first.key and mma.form == first.form and mma.accumulate


def _add(state: WgmmaState, mma: _Mma, product: np.ndarray) -> None:
    if mma.form.integer:
        product = _integers(state.sums[mma.key].view(np.int32), mma, product)
        state.sums[mma.key] = product.view(np.uint32)
        return
    typed = state.sums[mma.key].view(product.dtype)
    state.sums[mma.key] = (typed + product if mma.accumulate else product).view(np.uint32)


def _integers(sums: np.ndarray, mma: _Mma, product: np.ndarray) -> np.ndarray:
    """Wrap around, or saturate once a commit group."""
    total = np.rint(product).astype(np.int64)
    if mma.accumulate:
        total += sums
    return (np.clip(total, -(1 << 31), (1 << 31) - 1) if mma.form.saturate else total).astype(np.int32)


@handles("wgmma.wait_group")
def _wait(d: Decoder, instr: Instr, mods: list[str]) -> Effect:
    d.arity(1)
    d.only(mods, "sync", "aligned")
    operand = instr.operands[0]
    if not isinstance(operand, Imm):
        raise d.unsupported("requires a number")
    keep = operand.value

    @whole_warp
    def run(w: Any) -> int | None:
        state = _state(w)
        count = max(len(state.groups) - keep, 0)
        for op in state.groups[:count]:
            if not op.done:
                return w.block(op, f"the wgmma group issued at {op.where}")
            w.clock.ops |= 1 << op.bit
        finished = list(itertools.chain(*state.batches[:count]))
        state.groups, state.batches = state.groups[count:], state.batches[count:]
        _check_sources(w, finished)
        pending = {mma.key for mma in itertools.chain(*state.batches, state.open)}
        for key in {mma.key for mma in finished} - pending:
            _deliver(w, state, key)
        state.fenced = False
        return None

    return Effect(run)


def _check_sources(w: Any, finished: list[_Mma]) -> None:
    """Until now the MMAs may have read their registers of A."""
    for mma in finished:
        if any(w.regs[slot] is not value for slot, value in mma.sources):
            message = f"a register of A was written before the wgmma that reads it was waited for: {mma.where}"
            raise w.fault("register-in-flight", message)


def _deliver(w: Any, state: WgmmaState, key: Key) -> None:
    """Completed accumulators go back to their registers."""
    if w.regs[key[0]] is not IN_FLIGHT:
        return
    rows = list(to_registers(state.sums[key]))
    for slot, row in zip(key, rows, strict=True):
        w.regs[slot] = row
    state.rows[key] = rows
