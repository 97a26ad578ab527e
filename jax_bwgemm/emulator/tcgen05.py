"""tcgen05.mma and tcgen05.commit."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np

from jax_bwgemm.emulator.decode import Decoder, Effect, handles
from jax_bwgemm.emulator.descriptors import ELEMENT_BYTES, K_BYTES, operand_chunks, operand_matrix, sums_of_products
from jax_bwgemm.emulator.engine import AsyncOp
from jax_bwgemm.emulator.mbarrier import barrier_in, check_async_init, complete_async
from jax_bwgemm.emulator.memory import address_slot
from jax_bwgemm.emulator.syntax import Instr, Mem, Vec
from jax_bwgemm.emulator.tma import masked_ctas
from jax_bwgemm.emulator.tmem import LANE_GRANULE
from jax_bwgemm.emulator.tmem_access import CTA_GROUPS, cta_group, use_group

_TYPES = {"f16": {0: "f16", 1: "bf16"}, "tf32": {2: "tf32"}, "f8f6f4": {0: "e4m3", 1: "e5m2"}, "i8": {0: "u8", 1: "s8"}}
COPY = ("cp",)  # among the keys of a thread's operations in flight: a copy to TMEM
_ACCUMULATORS = {"f16": (0, 1), "tf32": (1,), "f8f6f4": (0, 1), "i8": (2,)}
_INT8_COLS = (8, 16, 24, *range(32, 257, 16))  # of kind::i8 with 64 rows


@dataclasses.dataclass(frozen=True)
class InstrDesc:
    """The 32-bit instruction descriptor (PTX ISA, tcgen05 instruction descriptor)."""

    d_type: int
    a: str
    b: str
    negate_a: bool
    negate_b: bool
    a_mn: bool
    b_mn: bool
    m: int
    n: int
    saturate: bool = False


@functools.lru_cache(maxsize=256)
def instruction_descriptor(bits: int, kind: str, group: int) -> InstrDesc | str:
    """The decoded descriptor, or what is wrong with it."""
    a, b = _TYPES[kind].get(bits >> 7 & 7), _TYPES[kind].get(bits >> 10 & 7)
    m, n = (bits >> 24 & 31) * 16, (bits >> 17 & 63) * 8
    negate_a, negate_b, a_mn, b_mn = (bool(bits >> at & 1) for at in (13, 14, 15, 16))
    saturate = bool(bits >> 3 & 1)
    found = InstrDesc(bits >> 4 & 3, a or "?", b or "?", negate_a, negate_b, a_mn, b_mn, m, n, saturate)
    step = {(1, 64): 8, (1, 128): 16, (2, 128): 32, (2, 256): 32}.get((group, m))
    reserved = bits & 7 or bits >> 29 or bits >> 23 & 1 or (saturate and kind != "i8")
    if a is None or b is None or found.d_type not in _ACCUMULATORS[kind] or reserved:
        return f"instruction descriptor {bits:#x} of kind {kind} is not modelled: {found}"
    if step is None or n % step or not step <= n <= 256:
        return f"M {m} and N {n} are not a shape of cta_group::{group}"
    if kind == "i8" and (negate_a or negate_b or (m == 64 and n not in _INT8_COLS)):
        return f"integers are not negated, and {n} columns with {m} rows are none of {_INT8_COLS}"
    return found


@dataclasses.dataclass
class _Part:
    """One CTA's part of an MMA: the chunks of its rows of A and B, and the index of its rows of D in its TMEM. For A in
    TMEM, `a` is the index of its columns instead."""

    cta: Any
    a: Any
    b: np.ndarray
    d_index: tuple[Any, ...]


def _d_index(w: Any, address: int, rows: int, group: int, n: int) -> tuple[tuple[Any, ...], tuple[Any, ...], int]:
    """Index of D in TMEM data, in its shadow, and its columns. Rows are those of one CTA."""
    lane, column = address >> 16, address & 0xFFFF
    if rows == 128:
        if lane:
            raise w.fault("tmem", f"an accumulator of 128 rows starts at lane {lane}")
        return (slice(None), slice(column, column + n)), (slice(None), slice(column, column + n)), n
    if group == 2:  # 64 rows, the upper half of the columns lies in lanes 64..127
        if lane:
            raise w.fault("tmem", f"an accumulator of cta_group::2 and M 128 starts at lane {lane}")
        half = n // 2
        lanes = np.arange(64)[:, None] + 64 * (np.arange(n)[None, :] >= half)
        return (lanes, column + np.arange(n)[None, :] % half), (slice(None), slice(column, column + half)), half
    if lane not in (0, 16):
        raise w.fault("tmem", f"an accumulator of 64 rows starts at lane {lane}")
    r = np.arange(64)
    lanes = (lane + 32 * (r // 16) + r % 16)[:, None]
    shadow = slice(lane // LANE_GRANULE, None, 2)
    return (lanes, column + np.arange(n)[None, :]), (shadow, slice(column, column + n)), n


@handles("tcgen05.mma")
def _mma(d: Decoder, instr: Instr, mods: list[str]) -> Effect:
    """`[d], a-desc, b-desc, idesc{, {lane mask}}, enable-input-d`."""
    collectors = [f"collector::a::{use}" for use in ("discard", "fill", "use", "lastuse")]
    d.only(mods, *CTA_GROUPS, *(f"kind::{kind}" for kind in _TYPES), *collectors)
    group = cta_group(d, mods)
    kind = next(m[6:] for m in mods if m.startswith("kind::"))
    if kind == "i8":
        d.not_on("tcgen05.mma.kind::i8", "sm_103", "sm_100f")  # ptxas 13.0 refuses it there
    d_slot, d_offset = address_slot(d, instr.operands[0])
    a_operand = instr.operands[1]
    a_in_tmem = isinstance(a_operand, Mem)
    if isinstance(a_operand, Mem) and a_operand.offset:
        raise d.unsupported("an offset from the address of A is not modelled")
    a_base = a_operand.base if isinstance(a_operand, Mem) else a_operand
    a_slot = d.src(a_base, 32 if a_in_tmem else 64)
    b_slot, i_slot = d.src(instr.operands[2], 64), d.src(instr.operands[3], 32)
    mask = [d.src(o, 32) for operand in instr.operands[4:] if isinstance(operand, Vec) for o in operand.items]
    rest = [operand for operand in instr.operands[4:] if not isinstance(operand, Vec)]
    if len(rest) != 1 or len(mask) not in (0, 4 * group):
        raise d.unsupported("requires a predicate, and a lane mask of 4 words a CTA or none")
    p_slot = d.src(rest[0], 1)

    def run(w: Any) -> None:
        if len(w.active) != 1:
            raise w.fault("multiple-issue", f"{len(w.active)} lanes issue one MMA each: elect one")
        if any(w.uniform(m) for m in mask):
            raise w.fault("descriptor", "a non-zero lane mask is not modelled")
        a, b, idesc = w.uniform(a_slot), w.uniform(b_slot), w.uniform(i_slot)
        issue_mma(w, group, kind, w.uniform(d_slot) + d_offset, a, b, idesc, bool(w.uniform(p_slot)), a_in_tmem)

    return Effect(run)


def issue_mma(
    w: Any, group: int, kind: str, d: int, a: int, b: int, idesc: int, accumulate: bool, a_in_tmem: bool
) -> None:
    """D = A B + (accumulate ? D : 0); the even CTA of a pair issues for both."""
    use_group(w, group)
    if group == 2 and w.cta.rank & 1:
        raise w.fault("tmem", "an MMA of cta_group::2 is issued by the odd CTA of the pair")
    desc = instruction_descriptor(idesc, kind, group)
    if isinstance(desc, str):
        raise w.fault("descriptor", desc)
    cluster = w.cta.cluster
    ctas = cluster.ctas[w.cta.rank : w.cta.rank + group]
    data_index, shadow_index, cols = _d_index(w, d, desc.m // group, group, desc.n)
    parts = []
    for cta in ctas:
        cta.tmem.check(w, d & 0xFFFF, cols)
        if a_in_tmem:
            rows_a: Any = _a_columns(w, cta, a, desc, group)
        else:
            rows_a = operand_chunks(w, cta, a, desc.m // group, ELEMENT_BYTES[desc.a], desc.a_mn, True)
        rows_b = operand_chunks(w, cta, b, desc.n // group, ELEMENT_BYTES[desc.b], desc.b_mn, True)
        parts.append(_Part(cta, rows_a, rows_b, data_index))
    op = cluster.new_op(w, "mma", lambda: _finish(desc, parts, accumulate), set(ctas))
    op.clock.ops |= w.tmem_copies  # an MMA runs after the copies that its thread has issued
    key = ("mma", w.gid, d, kind, desc.m, desc.n)
    _note(w, op, parts, shadow_index, accumulate, key)
    cluster.machine.counters.mma(w.cta.rank_in_grid)
    before = [earlier for earlier_key, earlier in w.mmas if earlier_key == key][-1:]
    before += [earlier for earlier_key, earlier in w.mmas if earlier_key == COPY]
    w.mmas = [pair for pair in w.mmas if not pair[1].done]
    w.mmas.append((key, op))
    w.mma_ops = w.mma_ops | 1 << op.bit
    cluster.engine.issue(op, before)


def _a_columns(w: Any, cta: Any, address: int, desc: InstrDesc, group: int) -> tuple[slice, slice]:
    """A in TMEM: row r in lane r, 32 bytes of K in 8 columns."""
    if desc.m // group != 128 or address >> 16 or desc.a_mn:
        raise w.fault("descriptor", f"A in TMEM requires 128 rows from lane 0, K-major, got {address:#x} and {desc}")
    cta.tmem.check(w, address, K_BYTES // 4)
    return slice(None), slice(address, address + K_BYTES // 4)


def _note(w: Any, op: AsyncOp, parts: list[_Part], shadow_index: tuple[Any, ...], accumulate: bool, key: Any) -> None:
    tracker = w.cta.cluster.tracker
    if not tracker.enabled:
        return
    number = tracker.event(w.gid, 0, op.bit, op.where, key)
    agent = ("mma", w.gid)
    for part in parts:
        if isinstance(part.a, tuple):
            tracker.read(part.cta.tmem.shadow, part.a, number, op.clock, agent, False)
        else:
            tracker.read(part.cta.shadow, part.a, number, op.clock, agent, True)
        tracker.read(part.cta.shadow, part.b, number, op.clock, agent, True)
        if accumulate:
            tracker.read(part.cta.tmem.shadow, shadow_index, number, op.clock, agent, False)
        tracker.write(part.cta.tmem.shadow, shadow_index, number, op.clock, False)


def _finish(desc: InstrDesc, parts: list[_Part], accumulate: bool) -> None:
    """Products are summed over the MMA's K, rounded to float32, and added to D once."""
    rows = desc.n // len(parts)  # the last of the 16 bytes may hold some that do not belong to it
    b = np.concatenate([operand_matrix(p.cta.chunks[p.b], desc.b, desc.b_mn)[:rows] for p in parts]).astype(np.float64)
    for part in parts:
        source = part.cta.tmem.data if isinstance(part.a, tuple) else part.cta.chunks
        a = operand_matrix(np.ascontiguousarray(source[part.a]), desc.a, desc.a_mn)
        product = sums_of_products(a, b, desc.d_type == 2)
        if desc.negate_a != desc.negate_b:
            product = 0 - product  # a sum of zeros is +0
        _accumulate(part.cta.tmem.data, part.d_index, product, desc, accumulate)


def _accumulate(
    data: np.ndarray, index: tuple[Any, ...], product: np.ndarray, desc: InstrDesc, accumulate: bool
) -> None:
    if desc.d_type == 2:
        _accumulate_integers(data.view(np.int32), index, product, desc.saturate, accumulate)
        return
    if desc.d_type == 0:
        if accumulate:
            product = product + data[index].astype(np.uint16).view(np.float16).astype(np.float32)
        data[index] = product.astype(np.float16).view(np.uint16)
        return
    typed = data.view(np.float32)
    if accumulate:
        typed[index] += product
    else:
        typed[index] = product


def _accumulate_integers(
    data: np.ndarray, index: tuple[Any, ...], product: np.ndarray, saturate: bool, accumulate: bool
) -> None:
    """Wraps around, or once an MMA saturates."""
    total = np.rint(product).astype(np.int64)
    if accumulate:
        total += data[index]
    if saturate:
        total = np.clip(total, -(1 << 31), (1 << 31) - 1)
    data[index] = total.astype(np.int32)


@handles("tcgen05.commit")
def _commit(d: Decoder, instr: Instr, mods: list[str]) -> Effect:
    """When all MMAs and copies that this thread has issued are complete: one arrival on the barrier, of each CTA of
    the mask. Commits of a thread arrive in their order, so who waits for one need not wait for those before it."""
    d.only(mods, *CTA_GROUPS, "mbarrier::arrive::one", "shared::cluster", "multicast::cluster", "b64")
    group, multicast = cta_group(d, mods), "multicast::cluster" in mods
    d.arity(1 + multicast)
    slot, offset = address_slot(d, instr.operands[0])
    mask = d.src(instr.operands[1], 16) if multicast else None

    def run(w: Any) -> None:
        if len(w.active) != 1:
            raise w.fault("multiple-issue", f"{len(w.active)} lanes commit: elect one")
        use_group(w, group)
        cta, at = w.cta.cluster.cta_of(w.uniform(slot) + offset, w)
        for target in masked_ctas(w, w.uniform(mask)) if mask is not None else [cta]:
            _commit_to(w, barrier_in(target, at, w.where()))

    return Effect(run)


def _commit_to(w: Any, barrier: Any) -> None:
    op: AsyncOp = w.cta.cluster.new_op(w, "commit", lambda: complete_async(op, barrier, 0, 1), {barrier.cta})
    check_async_init(op, barrier)
    op.clock.ops |= w.mma_ops | w.commit_ops
    before = [mma for _, mma in w.mmas] + w.commits
    w.commits = [commit for commit in w.commits if not commit.done] + [op]
    w.commit_ops |= 1 << op.bit
    w.cta.cluster.engine.issue(op, before)
