"""Places in our kernels, named by what stands near them, for the mutants.

A wait is named by what follows it: the last one above the first MMA is the MMA warp's wait for operands.
"""

from __future__ import annotations

from tests.emu.edits import AllButLast, At

WAIT = r"mbarrier\.try_wait"
LOAD, LOAD_A, LOAD_B = (
    rf"cp\.async\.bulk\.tensor.*complete_tx.*{where}" for where in ("", r"\+1024\]", r"\+(99328|66560)\]")
)
STORE = r"cp\.async\.bulk\.tensor.*bulk_group"
FENCE, COMMIT_GROUP, WAIT_GROUP = r"fence\.proxy\.async", r"bulk\.commit_group", r"bulk\.wait_group"
MMA, COMMIT, TMEM_LOAD = r"tcgen05\.mma", r"tcgen05\.commit", r"tcgen05\.ld"
ALLOC, DEALLOC = r"tcgen05\.alloc", r"tcgen05\.dealloc"
WGMMA = r"wgmma\.mma_async"
WRITE_BOX = r"st\.shared\.v4|stmatrix"
ARRIVE, EXPECT = r"mbarrier\.arrive\.shared", r"mbarrier\.arrive\.expect_tx"
INIT = r"mbarrier\.init"

STAGE_FREE = At(WAIT, before=LOAD)
OPERANDS_READY = At(WAIT, before=f"{MMA}|{WGMMA}")
ACC_FREE = At(WAIT, before=r"mov\.pred.*, 0;")
ACC_READY = At(WAIT, before=TMEM_LOAD)
ACC_DRAINED = At(WAIT, after=COMMIT)
LOADS_DRAINED = At(WAIT, before=r"setmaxnreg\.inc|bar\.sync\s+2")  # the last stage that was filled
PEER_FREED = At(WAIT, before=DEALLOC)
RELEASE_STAGE, PUBLISH_ACC = At(COMMIT, after=MMA), At(COMMIT, before=ALLOC)
RELEASE_ACC, TELL_PEER = At(ARRIVE, after=TMEM_LOAD), At(ARRIVE, before=DEALLOC)
STAGE_MASK = At(r"or\.b32", before=r"cvt\.u16\.u32")
ACC_MASK = At(r"mov\.b16", before=ALLOC)
LOADERS = At(r"setp\.gt\.u32", before=r"multicast::cluster")  # the last that loads a part for others
MULTICAST_MASK = At(r"mov\.b32", before=r"cvt\.u16\.u32")
STORE_WAITS = At(WAIT_GROUP + r".*[1-9];")
TILE_START_WAIT = AllButLast(WAIT_GROUP + r".*\s0;")  # the last one is the kernel's end
EXPECTED_BYTES = At(r"mov\.b32", before=EXPECT)
FULL_COUNT = At(r"mov\.b32", before=INIT)
EMPTY_COUNT = At(r"mov\.b32", before=INIT + r".*\+48\]")
ACC_COUNT = At(r"mov\.b32", before=INIT + r".*\+112\]")
PEER_COUNT = At(r"mov\.b32", before=INIT, last=True)
INSTRUCTION_DESCRIPTOR = At(r"mov\.b32", before=MMA)

# Matrix descriptors without their start: 8 rows lie 1024 bytes apart; B's columns come in two boxes of 8192 bytes.
_K_MAJOR, _N_MAJOR = 64 << 32 | 1 << 16, 64 << 32 | 512 << 16
_SM100, _SM90 = 2 << 61 | 1 << 46, 1 << 62
A_DESCRIPTOR = At(rf"or\.b64.*, ({_SM100 | _K_MAJOR}|{_SM90 | _K_MAJOR});")
B_DESCRIPTOR = At(rf"or\.b64.*, ({_SM100 | _N_MAJOR}|{_SM90 | _N_MAJOR});")
