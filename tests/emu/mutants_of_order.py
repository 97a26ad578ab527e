"""Mutants that break who waits for whom: barriers, fences, commits, arrivals."""

from __future__ import annotations

from tests.emu import sites
from tests.emu.edits import At, Nth, both, change, drop, move, number, operand
from tests.emu.mutant import ALL, BLACKWELL, CLUSTERS, FEW_STAGES, HOPPER, PAIR, SINGLE, Mutant, no_wait, other_parity

WAITS = [
    Mutant("stages are filled without waiting until they are free", ALL, no_wait(sites.STAGE_FREE)),
    Mutant("MMAs do not wait for their operands", ALL, no_wait(sites.OPERANDS_READY)),
    Mutant("MMAs do not wait for a free accumulator", BLACKWELL, no_wait(sites.ACC_FREE)),
    Mutant("the accumulator is read without a wait", BLACKWELL, no_wait(sites.ACC_READY)),
    Mutant("the loader leaves one stage behind", ALL, no_wait(sites.LOADS_DRAINED)),
    Mutant("the MMA warp leaves an accumulator behind", BLACKWELL, no_wait(sites.ACC_DRAINED)),
    Mutant("TMEM is freed without waiting for the peer", PAIR, no_wait(sites.PEER_FREED)),
    Mutant("no tcgen05.wait::ld", BLACKWELL, drop(At(r"tcgen05\.wait::ld"))),
    Mutant("loads wait for the other parity", ALL, other_parity(sites.STAGE_FREE)),
    Mutant("MMAs wait for the other parity", ALL, other_parity(sites.OPERANDS_READY)),
    Mutant("the wait for a free accumulator has the other parity", BLACKWELL, other_parity(sites.ACC_FREE)),
    Mutant("the wait for the accumulator has the other parity", BLACKWELL, other_parity(sites.ACC_READY)),
    Mutant("the wait for the peer has the other parity", PAIR, other_parity(sites.PEER_FREED)),
    Mutant("the loader's parity never flips", ALL, drop(At(r"xor\.b32", after=sites.LOAD))),
    Mutant("the MMA warp's parity never flips", BLACKWELL, drop(At(r"xor\.b32", after=sites.MMA))),
    Mutant("the store warps' parity never flips", BLACKWELL, drop(At(r"xor\.b32", after=sites.COMMIT_GROUP))),
    Mutant("MMAs wait for the next stage", BLACKWELL, change(sites.OPERANDS_READY, r"\[(%r\d+)\]", r"[\1+8]")),
]
COMMITS = [
    Mutant("stages are never released", BLACKWELL, drop(sites.RELEASE_STAGE)),
    Mutant("accumulators are never published", BLACKWELL, drop(sites.PUBLISH_ACC)),
    Mutant("stages are released before their MMAs", BLACKWELL, move(sites.RELEASE_STAGE, At(sites.MMA))),
    Mutant("accumulators are published with every step", SINGLE, move(sites.PUBLISH_ACC, At(sites.MMA))),
    Mutant("another stage is released", BLACKWELL, change(sites.RELEASE_STAGE, r"\+48\]", "+56]")),
    Mutant("another accumulator is published", BLACKWELL, change(sites.PUBLISH_ACC, r"\+96\]", "+104]")),
    Mutant(
        "stages are released in the leader only",
        PAIR,
        change(sites.STAGE_MASK, r"or\.b32(.*), .*, (.*);", r"mov.b32\1, \2;"),
    ),
    Mutant("accumulators are published in the leader only", PAIR, number(sites.ACC_MASK, lambda _: 1)),
    Mutant("accumulators are published in the peer only", PAIR, number(sites.ACC_MASK, lambda _: 2)),
    Mutant("a commit names a third CTA", PAIR, number(sites.ACC_MASK, lambda _: 7)),
    Mutant("a multicast load leaves the peer out", HOPPER, number(sites.MULTICAST_MASK, lambda _: 1)),
    Mutant("a multicast load names four CTAs", HOPPER, number(sites.MULTICAST_MASK, lambda _: 15)),
]
STORES = [
    Mutant("store buffers are rewritten without a wait", ALL, drop(sites.STORE_WAITS)),
    Mutant("one store too many stays in flight", ALL, number(sites.STORE_WAITS, lambda n: n + 1)),
    Mutant("no store buffer is waited for", ALL, both(drop(sites.STORE_WAITS), drop(sites.TILE_START_WAIT))),
    Mutant("two boxes use one store buffer", BLACKWELL, change(At(r"st\.shared\.v4.*\+8192\]"), r"\+8192", "")),
    Mutant("stores are not committed", ALL, drop(At(sites.COMMIT_GROUP))),
    Mutant("the kernel ends without waiting for its stores", ALL, drop(Nth(sites.WAIT_GROUP, index=-1))),
    Mutant("a tile does not wait for the stores of the one before", ALL + FEW_STAGES, drop(sites.TILE_START_WAIT)),
    Mutant("no fence.proxy.async", ALL, drop(At(sites.FENCE))),
    Mutant(
        "store warps fence before they write",
        ALL,
        move(At(sites.FENCE, before=sites.STORE), At(sites.WRITE_BOX, before=sites.STORE)),
    ),
    Mutant("only the storing warp fences", ALL, move(At(sites.FENCE, before=sites.STORE), At(sites.STORE))),
    Mutant("a box is stored before all warps have written it", ALL, drop(At(r"bar\.sync", before=sites.STORE))),
    Mutant(
        "a store reads the next buffer",
        ALL,
        change(At(sites.STORE, before=sites.COMMIT_GROUP), r"\[(%r\d+)\], (%rd\d+);", r"[\1+8192], \2;"),
    ),
    Mutant(
        "a box is written without its swizzle",
        BLACKWELL,
        change(At(r"xor\.b32", after=r"and\.b32.*, 48;"), r"xor\.b32(.*), .*, (.*);", r"mov.b32\1, \2;"),
    ),
    Mutant("the CTAs' halves of C are swapped", CLUSTERS, operand(At(sites.STORE), r", (%r\d+), ", "xor.b32 {}, 128")),
]
ARRIVALS = [
    Mutant("no bytes are expected", ALL, drop(At(sites.EXPECT))),
    Mutant("too few bytes are expected", ALL, number(sites.EXPECTED_BYTES, lambda n: n // 2)),
    Mutant("too many bytes are expected", ALL, number(sites.EXPECTED_BYTES, lambda n: n + 128)),
    Mutant("every lane expects the bytes", ALL, drop(At(r"bra", before=sites.EXPECT))),
    Mutant("the other CTA of the pair expects the bytes", PAIR, change(At(r"setp\.ne", before=sites.LOAD), "ne", "eq")),
    Mutant("each CTA of the pair signals its own barrier", PAIR, change(At(r"and\.b32.*-16777224"), "-16777224", "-8")),
    Mutant("accumulators are never released", BLACKWELL, drop(sites.RELEASE_ACC)),
    Mutant(
        "an accumulator is released before its last read",
        BLACKWELL,
        move(At(r"elect\.sync", before=sites.ARRIVE), At(sites.TMEM_LOAD, before=sites.DEALLOC), ":$"),
    ),
    Mutant("the peer is never told that TMEM is free", PAIR, drop(sites.TELL_PEER)),
    Mutant("stages are released to the first CTA only", HOPPER, operand(At("mapa"), r"(%r\d+);", "and.b32 {}, 0")),
    Mutant("stages are released in no CTA", HOPPER, drop(At(sites.ARRIVE))),
]
SETUP = [
    Mutant("full barriers expect two arrivals", ALL, number(sites.FULL_COUNT, lambda n: n + 1)),
    Mutant("empty barriers expect twice the arrivals", ALL, number(sites.EMPTY_COUNT, lambda n: 2 * n)),
    Mutant("empty barriers expect half the arrivals", HOPPER, number(sites.EMPTY_COUNT, lambda n: n // 2)),
    Mutant("accumulators wait for half of the store warps", BLACKWELL, number(sites.ACC_COUNT, lambda n: n // 2)),
    Mutant("accumulators wait for twice the store warps", BLACKWELL, number(sites.ACC_COUNT, lambda n: 2 * n)),
    Mutant("the peer's barrier expects two arrivals", PAIR, number(sites.PEER_COUNT, lambda n: 2 * n)),
    Mutant("a barrier is not initialised", ALL, drop(At(sites.INIT + r".*\+48\]"))),
    Mutant("no fence.mbarrier_init", ALL, drop(At(r"fence\.mbarrier_init"))),
    Mutant(
        "fence.mbarrier_init after the arrive",
        CLUSTERS,
        move(At(r"fence\.mbarrier_init"), At(r"barrier\.cluster\.wait")),
    ),
    Mutant("no barrier after the initialisation", ALL, drop(At(r"barrier\.cluster\.wait|bar\.sync\s+0;"))),
    Mutant("no arrive before the cluster barrier", CLUSTERS, drop(At(r"barrier\.cluster\.arrive"))),
]
