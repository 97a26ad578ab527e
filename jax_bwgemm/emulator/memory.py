"""The generic proxy's loads and stores: ld and st."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from jax_bwgemm.emulator.decode import PARAM_BASE, SHARED_BASE, Decoder, Effect, Pure, handles
from jax_bwgemm.emulator.errors import Fault
from jax_bwgemm.emulator.global_order import GPU_SCOPE, SCOPES, WEAK, Strength
from jax_bwgemm.emulator.policies import policy_check
from jax_bwgemm.emulator.races import GRANULE, KNOWN
from jax_bwgemm.emulator.syntax import Instr, Operand, Reg
from jax_bwgemm.emulator.values import UINT

_CACHE_MODS = (
    "weak",
    "relaxed",
    "acquire",
    "release",
    "volatile",
    "cta",
    "cluster",
    "gpu",
    "sys",
    "ca",
    "cg",
    "cs",
    "lu",
    "cv",
    "wb",
    "wt",
    "nc",
    "L1::no_allocate",
    "L1::evict_first",
    "L1::evict_last",
    "L1::evict_normal",
    "L1::evict_unchanged",
    "L2::cache_hint",
    "L2::64B",
    "L2::128B",
    "L2::256B",
    "L2::evict_first",
    "L2::evict_last",
    "L2::evict_normal",
    "global",
    "shared",
    "shared::cta",
    "shared::cluster",
    "v2",
    "v4",
    "v8",
)


TYPES = {f"{kind}{bits}": bits for kind in "bus" for bits in (8, 16, 32, 64)} | {"f32": 32, "f64": 64, "b128": 128}


def _access(d: Decoder, mods: list[str]) -> tuple[int, int, str]:
    """Bits of an element, element count and state space of a ld/st."""
    kind = mods[-1]
    if kind not in TYPES:
        raise d.unsupported(f"unknown type `.{kind}`")
    d.only(mods[:-1], *_CACHE_MODS)
    count = next((int(m[1:]) for m in mods if m in ("v2", "v4", "v8")), 1)
    space = next((m.split("::")[0] for m in mods if m.split("::")[0] in ("global", "shared")), "generic")
    if TYPES[kind] * count > (128 if kind == "b128" else 256):
        raise d.unsupported("moves more than 32 bytes a lane, or several of .b128")
    return TYPES[kind], count, space


def _strength(d: Decoder, mods: list[str]) -> Strength:
    """What an access says of order. Volatile ones are relaxed at system scope (PTX ISA, ld.volatile)."""
    order = next((m for m in mods if m in ("relaxed", "acquire", "release", "volatile")), "weak")
    scope = next((SCOPES[m] for m in mods if m in SCOPES), None)
    if (scope is None) != (order in ("weak", "volatile")):
        raise d.unsupported("requires a scope with .relaxed, .acquire and .release, and none without")
    return Strength("relaxed", GPU_SCOPE) if order == "volatile" else Strength(order, scope or WEAK)


@handles("ld.param")
def _ld_param(d: Decoder, instr: Instr, mods: list[str]) -> Pure | Effect:
    """Parameters are constants of a launch; which one is read may be a register's to say."""
    d.arity(2)
    d.only(mods[:-1], "v2", "v4")
    if TYPES.get(mods[-1], 128) == 128:
        raise d.unsupported(f"unknown type `.{mods[-1]}`")
    size = TYPES[mods[-1]] // 8
    address = d.mem(instr.operands[1])
    if isinstance(address.base, Reg):
        return _ld_param_somewhere(d, instr, mods[-1])
    name = getattr(address.base, "name", "")
    if name not in d.param_at:
        raise d.unsupported("requires the address of a parameter")
    start = d.param_at[name].offset + address.offset
    items = d.items(instr.operands[0])
    if address.offset < 0 or address.offset + size * len(items) > d.param_at[name].size:
        raise d.unsupported("reads past the end of the parameter")
    dests = [(d.dest(o), d.register_bits(o, 8 * size)) for o in items]
    signed_type = mods[-1][0] == "s"
    values = [
        int.from_bytes(d.params[start + i * size : start + (i + 1) * size], "little", signed=signed_type)
        & ((1 << bits) - 1)
        for i, (_, bits) in enumerate(dests)
    ]

    def run(r: list[Any]) -> None:
        for (slot, _), value in zip(dests, values, strict=True):
            r[slot] = value

    return Pure(run, tuple(dests))


def _ld_param_somewhere(d: Decoder, instr: Instr, kind: str) -> Effect:
    size, items = TYPES[kind] // 8, d.items(instr.operands[0])
    slot, offset = address_slot(d, instr.operands[1])
    dests = [(d.dest(o), d.register_bits(o, 8 * size)) for o in items]
    spans = [(p.offset, p.offset + p.size) for p in d.param_at.values()]

    def run(w: Any) -> None:
        starts = (lane_addresses(w, slot, offset) - PARAM_BASE).tolist()
        for start in starts:
            end = start + size * len(items)
            if start % (size * len(items)) or not any(first <= start and end <= last for first, last in spans):
                raise w.fault("out-of-bounds", f"`ld.param` of {end - start} bytes at {start} is no parameter's")
        for i, (dest, bits) in enumerate(dests):
            found = [
                int.from_bytes(d.params[start + i * size : start + (i + 1) * size], "little", signed=kind[0] == "s")
                & ((1 << bits) - 1)
                for start in starts
            ]
            if len(found) == 1:
                w.put(dest, found[0], bits)
            else:
                w.spread(dest, np.array(found, UINT[bits]), bits)

    return Effect(run, tuple(dests))


def address_slot(d: Decoder, operand: Operand) -> tuple[int, int]:
    """Slot and byte offset of `[base + offset]`; the base may be a number."""
    mem = d.mem(operand)
    return d.address(mem.base), mem.offset


def _policy(d: Decoder, instr: Instr, mods: list[str]) -> Callable[[Any], None]:
    has_policy = "L2::cache_hint" in mods
    d.arity(2 + has_policy)
    return policy_check(d, instr.operands[2]) if has_policy else lambda w: None


def _elements(d: Decoder, operand: Operand, count: int) -> tuple[Operand, ...]:
    items = d.items(operand)
    if len(items) != count:
        raise d.unsupported(f"requires {count} registers, got {len(items)}")
    return items


@handles("ld")
def _ld(d: Decoder, instr: Instr, mods: list[str]) -> Effect:
    bits, count, space = _access(d, mods)
    slot, offset = address_slot(d, instr.operands[1])
    dests = [(d.dest(o), d.register_bits(o, bits)) for o in _elements(d, instr.operands[0], count)]
    sign, parts = mods[-1][0] == "s", max(bits // 64, 1)
    check, strength = _policy(d, instr, mods), _strength(d, mods)

    def run(w: Any) -> int | None:
        check(w)
        if strength.scope and (waits := _poll(w, slot, offset, space)) is not None:
            return waits
        data = load(w, slot, offset, min(bits, 64), count * parts, space, strength)
        if parts > 1:
            data = data[:, :1].astype(object) | data[:, 1:].astype(object) << 64
        for i, (dest, reg_bits) in enumerate(dests):
            column = data[:, i]
            if sign and bits < reg_bits:
                column = column.view(f"i{bits // 8}").astype(f"i{reg_bits // 8}").view(UINT[reg_bits])
            elif bits < reg_bits:
                column = column.astype(UINT[reg_bits])
            if len(column) == 1:
                w.put(dest, int(column[0]), reg_bits)
            else:
                w.spread(dest, np.ascontiguousarray(column), reg_bits)
        return None

    return Effect(run, tuple(dests))


@handles("st")
def _st(d: Decoder, instr: Instr, mods: list[str]) -> Effect:
    bits, count, space = _access(d, mods)
    slot, offset = address_slot(d, instr.operands[0])
    sources = [d.src(o, bits, wider=True) for o in _elements(d, instr.operands[1], count)]
    check, strength = _policy(d, instr, mods), _strength(d, mods)

    def run(w: Any) -> None:
        check(w)
        value = w.value(slot)
        lanes = w.active
        data = np.empty((len(lanes), count), UINT[bits])
        for i, source in enumerate(sources):
            v = w.value(source)
            data[:, i] = v[lanes] if isinstance(v, np.ndarray) else v & ((1 << bits) - 1)
        if bits == 128:
            data = np.concatenate([data & ((1 << 64) - 1), data >> 64], axis=1).astype(np.uint64)
        if not isinstance(value, np.ndarray) and len(lanes) > 1:
            data = data[-1:]  # all lanes write one place; one of them wins
        store(w, slot, offset, min(bits, 64), data, space, strength)

    return Effect(run)


_ADDRESS_MASK = (1 << 64) - 1


def lane_addresses(w: Any, slot: int, offset: int) -> np.ndarray:
    """The address of each active lane, or one if all agree."""
    value = w.value(slot)
    if isinstance(value, np.ndarray):
        return value[w.active].astype(np.int64) + offset
    return np.array([(value + offset) & _ADDRESS_MASK], np.uint64).view(np.int64)


def _resolve(w: Any, slot: int, offset: int, space: str) -> tuple[np.ndarray, str]:
    addresses = lane_addresses(w, slot, offset)
    if space == "generic":
        first = int(addresses[0])
        if SHARED_BASE <= first < SHARED_BASE + (1 << 32):
            return addresses - SHARED_BASE, "shared"
        if PARAM_BASE <= first < PARAM_BASE + (1 << 16):
            raise w.fault("out-of-bounds", "a generic access to parameter space is not modelled")
        return addresses, "global"
    return addresses, space


def _poll(w: Any, slot: int, offset: int, space: str) -> int | None:
    """Waits for a store where a warp does nothing but look."""
    addresses, space = _resolve(w, slot, offset, space)
    order, first = w.cta.cluster.machine.order, int(addresses[0])
    if space == "shared" or not order.is_stuck(w, first):
        return None
    blocked: int = w.block(order.polls, f"a store to global address {first:#x}; clusters run in the order of the grid")
    return blocked


def load(w: Any, slot: int, offset: int, bits: int, count: int, space: str, strength: Strength) -> np.ndarray:
    """(lanes or 1, count) elements."""
    addresses, space = _resolve(w, slot, offset, space)
    if space == "shared":
        return shared_load(w, addresses, bits, count, _lanes(w, addresses))
    buffer, start, name = _global(w, addresses, bits // 8 * count)
    index = (start[:, None] + np.arange(count * bits // 8)).astype(np.intp)
    found = w.cta.cluster.machine.order.read(w, buffer, name, index, strength)
    return np.ascontiguousarray(found).view(UINT[bits])


def store(w: Any, slot: int, offset: int, bits: int, data: np.ndarray, space: str, strength: Strength) -> None:
    addresses, space = _resolve(w, slot, offset, space)
    if space == "shared":
        shared_store(w, addresses, bits, data, _lanes(w, addresses))
        return
    size = bits // 8 * data.shape[1]
    buffer, start, name = _global(w, addresses, size)
    index = (start[:, None] + np.arange(size)).astype(np.intp)
    new = np.ascontiguousarray(data).view(np.uint8)
    w.cta.cluster.machine.order.write(w, buffer, name, index, strength, new)
    buffer[index] = new


def _global(w: Any, addresses: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray, str]:
    """The buffer, the places in it, and its name."""
    w.check_grid_wait()
    if (addresses % size).any():
        bad = int(addresses[addresses % size != 0][0])
        raise w.fault("misaligned", f"global address {bad:#x} is not a multiple of {size}")
    return find_global(w, addresses, size)


def find_global(w: Any, addresses: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray, str]:
    """`_global` of addresses of any alignment."""
    low, high = int(addresses.min()), int(addresses.max())
    try:
        buffer, offset, name = w.cta.cluster.machine.memory.find(low, high - low + size)
    except Fault as fault:
        raise w.fault(fault.rule, fault.message) from None
    return buffer, addresses - low + offset, name


# shared memory


def shared_place(w: Any, addresses: np.ndarray, size: int, low: int, high: int) -> tuple[Any, np.ndarray]:
    """The CTA and the offsets of 32-bit shared addresses from `low` to `high`, all in one CTA, aligned, in bounds, and
    on no mbarrier."""
    cta, start = w.cta.cluster.cta_of(low, w)
    end = start + high - low + size
    offsets = addresses & 0xFFFFFF
    if (offsets & (size - 1)).any():
        raise w.fault(
            "misaligned", f"shared address {int(offsets[offsets % size != 0][0]):#x} is not a multiple of {size}"
        )
    if end > cta.limit:
        raise w.fault("out-of-bounds", f"shared address {end - size:#x} ({size} bytes), the launch has {cta.limit:#x}")
    if cta is not w.cta:
        cta.accesses[w.gid] = int(w.clock.rows[KNOWN, w.gid])
        if cta.exited:
            raise w.fault("exited-cta", f"an access to the shared memory of CTA {cta.rank_in_grid}, which has ended")
    for at in cta.barriers:
        if start < at + 8 and end > at and ((offsets < at + 8) & (offsets + size > at)).any():
            raise w.fault("barrier-misuse", f"a load or store touches the live mbarrier at {at:#x}")
    return cta, offsets


def _by_cta(addresses: np.ndarray) -> list[np.ndarray]:
    """Positions of the addresses, those in one CTA together."""
    ranks = addresses >> 24
    return [np.flatnonzero(ranks == rank) for rank in np.unique(ranks)]


def _lanes(w: Any, addresses: np.ndarray) -> np.ndarray | None:
    """Which lane has which address; None where all have one."""
    active: np.ndarray = w.active
    return active if len(active) == len(addresses) else None


def shared_load(w: Any, addresses: np.ndarray, bits: int, count: int, lanes: np.ndarray | None = None) -> np.ndarray:
    """`lanes`: of the addresses; None for an access of the warp as a whole."""
    low, high = int(addresses.min()), int(addresses.max())
    if low >> 24 != high >> 24:
        whole = np.empty((len(addresses), count), UINT[bits])
        for part in _by_cta(addresses):
            whole[part] = shared_load(w, addresses[part], bits, count, None if lanes is None else lanes[part])
        return whole
    size = bits // 8 * count
    cta, offsets = shared_place(w, addresses, size, low, high)
    if cta is not w.cta:
        w.cta.cluster.machine.counters.dsmem_load(w.cta.rank_in_grid, len(addresses) * size)
    note_read(w, cta, offsets, size, lanes)
    index = (offsets // (bits // 8))[:, None] + np.arange(count)
    found: np.ndarray = cta.words[bits][index]
    return found


def shared_store(w: Any, addresses: np.ndarray, bits: int, data: np.ndarray, lanes: np.ndarray | None = None) -> None:
    """`lanes` as for `shared_load`."""
    low, high = int(addresses.min()), int(addresses.max())
    if low >> 24 != high >> 24:
        for part in _by_cta(addresses):
            shared_store(w, addresses[part], bits, data[part], None if lanes is None else lanes[part])
        return
    size = bits // 8 * data.shape[1]
    cta, offsets = shared_place(w, addresses, size, low, high)
    if cta is not w.cta:
        w.cta.cluster.machine.counters.dsmem_store(w.cta.rank_in_grid, len(addresses) * size)
    note_write(w, cta, offsets, size, lanes)
    cta.words[bits][(offsets // (bits // 8))[:, None] + np.arange(data.shape[1])] = data
    cta.version += 1


def _granules(offsets: np.ndarray, size: int) -> np.ndarray:
    first = offsets // GRANULE
    return first if size <= GRANULE else (first[:, None] + np.arange(size // GRANULE)).ravel()


def note_read(w: Any, cta: Any, offsets: np.ndarray, size: int, lanes: np.ndarray | None) -> None:
    """A generic read of `size` bytes at each offset."""
    tracker = w.cta.cluster.tracker
    if tracker.enabled:
        w.touch(is_write=False)
        tracker.read(cta.shadow, _granules(offsets, size), _event(w, cta, offsets, size, lanes), w.clock, w.gid, False)


def note_write(w: Any, cta: Any, offsets: np.ndarray, size: int, lanes: np.ndarray | None) -> None:
    """A generic write of `size` bytes at each offset."""
    tracker = w.cta.cluster.tracker
    if tracker.enabled:
        w.touch(is_write=True)
        tracker.write(cta.shadow, _granules(offsets, size), _event(w, cta, offsets, size, lanes), w.clock, False)


def _event(w: Any, cta: Any, offsets: np.ndarray, size: int, lanes: np.ndarray | None) -> int:
    epoch, extent = int(w.clock.rows[KNOWN, w.gid]), (offsets, size)
    number: int = w.cta.cluster.tracker.event(w.gid, epoch, -1, w.where(), None, extent, cta is not w.cta, lanes)
    return number
