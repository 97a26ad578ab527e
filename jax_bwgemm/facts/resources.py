"""What a CTA of a tile has: threads, boxes of operands and results, stages, shared memory, TMEM columns, workspace."""

from __future__ import annotations

import math

from jax_bwgemm.facts import thin
from jax_bwgemm.facts.arch import Arch, arch_of, family_of
from jax_bwgemm.facts.epilogue import Moves
from jax_bwgemm.facts.families import TMEM_LANES
from jax_bwgemm.facts.problem import DTYPE_BYTES
from jax_bwgemm.facts.tile import SWIZZLE_BYTES, Tile

SEGMENT_BYTES = 512  # of a row that a warp of threads stores at once: 16 bytes a lane
STORE_SPAN_BYTES = 64  # one row of a store box: few registers at a time, and several boxes are in flight in 32 KiB
SWIZZLE_ATOM_BYTES = 1024  # eight rows of 128 bytes, PTX ISA, swizzling modes: what a stage of shared memory starts on
BARRIER_BYTES = 1024  # mbarriers and the TMEM address, padded so that the first stage starts on a swizzle atom
EPILOGUE_STAGES, FEWEST_BUFFERS = 4, 2  # store buffers of a store group; and those that two boxes take turns in
DIRECT_STAGES = 8  # of a direct tile: two less are on their way before the first is multiplied
DIRECT_SPLITS = 4  # CTAs of an SM, at least, that divide k: while one realigns rows, another's wgmmas run
CTA_BYTES = 1024  # of shared memory that the system has of each CTA, CUDA C++ programming guide, compute capability 9.0
CHUNK_BYTES = 16  # of a load or store of a thread
FLAG_BYTES = 4096  # at the front of a workspace: 8 bytes for each CTA and store group
WARPS_PER_WARPGROUP = 4
PLAIN = Moves()


def moves_of(tile: Tile, moves: Moves) -> Moves:
    """What a store carries where an epilogue has `moves`: of a symmetric tile every result twice."""
    return moves._replace(results=2 * moves.results) if tile.symmetric else moves


def storing_warps(tile: Tile, target: str) -> int:
    """Those that multiply, where accumulators are registers; else four, for each reads a quarter of the TMEM lanes (PTX
    ISA, tcgen05.ld)."""
    return WARPS_PER_WARPGROUP * (1 if family_of(target).sums_in_tmem else tile.num_consumer_warpgroups)


def num_threads(tile: Tile, target: str, moves: Moves = PLAIN) -> int:
    """Those that store, and the warps that load, multiply or load the residual, where others than these do it."""
    of = family_of(target)
    if tile.is_thin:
        return 32 * thin.WARPS
    if tile.direct:
        return 32 * storing_warps(tile, target)
    others = of.load_warps + of.mma_warps + (of.residual_warps if moves.matrices else 0)
    return 32 * (storing_warps(tile, target) + others)


def column_halves(tile: Tile) -> int:
    """2 where a pair of 64-row CTAs keeps the columns' halves in different TMEM lanes (PTX ISA, tcgen05 layout B)."""
    return 2 if tile.cta_group == 2 and tile.mma_m == TMEM_LANES else 1


def store_groups(tile: Tile, target: str) -> int:
    """Groups of warps that store on their own: warpgroups that have rows of their own in registers, or the warps of one
    that have the same columns in TMEM."""
    return column_halves(tile) if family_of(target).sums_in_tmem else tile.num_consumer_warpgroups


def _group_cols(tile: Tile, target: str) -> int:
    """Columns of a store group's part of the result."""
    return tile.out_n // (column_halves(tile) if family_of(target).sums_in_tmem else 1)


def store_rows(tile: Tile, target: str) -> int:
    """Rows of a store box: those of one MMA in a CTA."""
    return family_of(target).slab_rows or tile.mma_m // tile.cta_group


def warp_rows(tile: Tile, target: str) -> int:
    """Rows of a store box that a warp has in its registers."""
    return store_rows(tile, target) * store_groups(tile, target) // storing_warps(tile, target)


def store_cols(tile: Tile, out_dtype: str, target: str) -> int:
    """Columns of a store box: STORE_SPAN_BYTES, or fewer where they do not divide the columns of a store group; 16 or
    32 bytes' in a split along k, whose CTAs share the boxes out among themselves."""
    return _box_cols(tile, _group_cols(tile, target), out_dtype)


def _box_cols(tile: Tile, group_cols: int, out_dtype: str) -> int:
    out_bytes = DTYPE_BYTES[out_dtype]
    widest = STORE_SPAN_BYTES if tile.cluster_k == 1 else max(32, 16 * out_bytes)
    return _span_bytes(group_cols * out_bytes, widest) // out_bytes


def boxes_a_store(
    tile: Tile, out_dtype: str, c_major: str, target: str, store: str = "tma", moves: Moves = PLAIN
) -> int:
    """Boxes side by side that leave by one TMA store: several of an n-major result, if it is the only one and no matrix
    comes into its buffers; a tile's boxes fill all stores."""
    box_bytes = store_cols(tile, out_dtype, target) * DTYPE_BYTES[out_dtype]
    is_alone = moves_of(tile, moves)[:2] == PLAIN[:2] and tile.cluster_k == 1
    if store != "tma" or c_major != "n" or box_bytes != STORE_SPAN_BYTES or not is_alone:
        return 1
    return math.gcd(family_of(target).boxes_a_store, tile.out_n * DTYPE_BYTES[out_dtype] // box_bytes)


def store_box(
    tile: Tile, out_dtype: str, c_major: str, target: str, store: str = "tma", moves: Moves = PLAIN
) -> tuple[int, int]:
    """(contiguous, other) elements of what leaves at once: store_cols of each box of a store by store_rows, or a span
    of rows by store_cols."""
    rows, cols = store_rows(tile, target), store_cols(tile, out_dtype, target)
    if c_major == "n":
        return cols * boxes_a_store(tile, out_dtype, c_major, target, store, moves), rows
    return _span_bytes(rows * DTYPE_BYTES[out_dtype], SWIZZLE_BYTES) // DTYPE_BYTES[out_dtype], cols


def warpgroup_slabs(tile: Tile) -> int:
    """Where accumulators are registers: slabs of 64 rows of a tile that a warpgroup has; in a ping-pong all."""
    return tile.cta_m // (64 * (1 if tile.pingpong else tile.num_consumer_warpgroups))


def store_boxes(tile: Tile, out_dtype: str) -> int:
    """Where accumulators are registers: boxes of a tile that a warpgroup stores by TMA."""
    return warpgroup_slabs(tile) * (tile.out_n // _box_cols(tile, tile.out_n, out_dtype))


def store_buffers(tile: Tile, out_dtype: str, target: str, moves: Moves = PLAIN) -> int:
    """Store buffers of each store group, or in each of its `moves.planes`. Those that take matrices' boxes first are
    for a whole tile ahead, or for as large a part of it as divides it. A tile of few stages gives some away for one
    more stage, if it has one result, but a ping-pong, whose many boxes leave at once."""
    of = family_of(target)
    most = of.residual_buffers // moves.planes
    if most and moves.matrices:
        boxes = store_boxes(tile, out_dtype)
        return max(count for count in range(1, most + 1) if boxes % count == 0)
    if of.few_stages == 0 or moves.matrices or moves_of(tile, moves).results > 1 or tile.pingpong:
        return EPILOGUE_STAGES
    most_stages, stages = (_stages_beside(tile, out_dtype, target, n) for n in (FEWEST_BUFFERS, EPILOGUE_STAGES))
    return FEWEST_BUFFERS if stages <= of.few_stages and stages < most_stages else EPILOGUE_STAGES


def _stages_beside(tile: Tile, out_dtype: str, target: str, buffers: int) -> int:
    """Stages beside so many store buffers of each store group. A stage's rows are as long whatever their dtype."""
    free = arch_of(target).smem_bytes - BARRIER_BYTES - buffers * store_box_bytes(tile, out_dtype, target)
    return free // ((tile.cta_m + tile.load_n) * SWIZZLE_BYTES)


def defers_store(
    tile: Tile, out_dtype: str, store: str, target: str, a_in_registers: bool = False, moves: Moves = PLAIN
) -> bool:
    """Whether a tile's rounded result stays in registers and leaves during the next tile's main loop, beside its
    wgmmas. A ping-pong's other warpgroup multiplies meanwhile, and a split along k stores through the stages.
    Threads that store would keep the wgmmas waiting (tried: slower). An A in registers takes some of them: one slab's
    16 find room beside any held result. With matrices, the store buffers hold the result; several results, nobody; and
    reductions take the registers."""
    held_registers = family_of(target).held_registers.get(tile.num_consumer_warpgroups, 0)
    if held_registers == 0 or store != "tma" or tile.pingpong or tile.cluster_k > 1 or moves != moves_of(tile, PLAIN):
        return False
    sums = tile.cta_m * tile.mma_n // (128 * tile.num_consumer_warpgroups)
    more_slabs = warpgroup_slabs(tile) - 1
    fragments = 16 * more_slabs if a_in_registers else 0
    held = sums // tile.num_bs * DTYPE_BYTES[out_dtype] // 4
    return sums * (2 if tile.promoted else 1) + held + fragments <= held_registers


def segments(tile: Tile, out_dtype: str, target: str) -> tuple[int, int]:
    """(rows, columns) that a warp stores at a time where TMA cannot step over an n-major result's rows. Rows: 16 or 8,
    what its share of the store buffers holds; columns: at most SEGMENT_BYTES and 128 accumulators a thread, or in a
    split along k a store box's."""
    rows, warps = store_rows(tile, target), storing_warps(tile, target) // store_groups(tile, target)  # of a group
    out_bytes, box_cols = DTYPE_BYTES[out_dtype], store_cols(tile, out_dtype, target)
    share = store_buffers(tile, out_dtype, target) * rows * box_cols * out_bytes // warps
    cols = box_cols
    if tile.cluster_k == 1:
        widest = min(SEGMENT_BYTES, share // 8, 128 * 32 * warps // rows * out_bytes)
        cols = _span_bytes(_group_cols(tile, target) * out_bytes, widest) // out_bytes
    return (16 if 16 * cols * out_bytes <= share else 8), cols


def direct_smem_bytes(tile: Tile, in_dtype: str, out_dtype: str, target: str, stages: int) -> int:
    """Of a launch with so many stages: these, or if that is more what goes through them when sums are stored, parts of
    sums and rows; and barriers behind them where CTAs divide k."""
    rows, cols = segments(tile, out_dtype, target)
    stored = exchange_bytes(tile) + storing_warps(tile, target) * rows * cols * DTYPE_BYTES[out_dtype]
    return max(stages * direct_stage_bytes(tile, in_dtype), stored) + (BARRIER_BYTES if tile.cluster_k > 1 else 0)


def load_box(tile: Tile, operand: str, major: str, in_dtype: str) -> tuple[int, int]:
    """(contiguous, other) elements of one TMA load of operand "a" or of a "b"; of CTAs that share it, `loading_ctas`
    each load a part.

    k-major: a swizzle span of k by as many rows as lie together (those of the other half of a pair lie between its MMA
    tiles); else a span of rows (several boxes a stage) by the stage's k.
    """
    rows, loading = _rows_together(tile, operand), loading_ctas(tile, operand, major)
    if major == "k":
        return SWIZZLE_BYTES // DTYPE_BYTES[in_dtype], rows // loading
    return _span_bytes(rows * DTYPE_BYTES[in_dtype], SWIZZLE_BYTES) // DTYPE_BYTES[in_dtype], tile.k_tile // loading


def _rows_together(tile: Tile, operand: str) -> int:
    a_rows = tile.cta_m if tile.cta_group == 1 else tile.mma_m // 2
    return a_rows if operand == "a" else tile.out_n if tile.gated else tile.load_n


def loading_ctas(tile: Tile, operand: str, major: str) -> int:
    """Of the CTAs that share "a" or "b", those that load a part of it for all: each of them; or where that is no whole
    8-row swizzle atoms of a k-major b, every second or fourth of so many, as of 80 rows two of four."""
    num, rows = sharing_ctas(tile, operand), _rows_together(tile, operand)
    while operand == "b" and major == "k" and num > 2 and rows % (8 * num):
        num //= 2
    return num


def sharing_ctas(tile: Tile, operand: str) -> int:
    """CTAs that one multicast load of "a" or "b" serves: those along n, or those of the same half along m."""
    return tile.cluster_n if operand == "a" else tile.cluster_m // tile.cta_group


def reads_a_from_registers(in_dtype: str, a_major: str, target: str) -> bool:
    """Whether threads pick A's fragments out of shared memory, for MMAs cannot read it there as it lies."""
    return DTYPE_BYTES[in_dtype] not in family_of(target).mn_major_bytes and a_major == "m"


def swizzle_atom_bytes(in_dtype: str, major: str, target: str) -> int:
    """What a swizzle moves as a whole: 16 bytes, or more of TF32 whose rows are contiguous."""
    return family_of(target).word_atom_bytes if in_dtype == "float32" and major != "k" else 16


def _span_bytes(extent_bytes: int, widest: int) -> int:
    """The widest power of two of at most `widest` bytes that divides `extent_bytes`, 16 if none does: of up to 128, the
    swizzle spans (16: no swizzle)."""
    spans = (512, 256, 128, 64, 32, 16)
    return next(span for span in spans if span <= widest and (extent_bytes % span == 0 or span == 16))


def stage_bytes(tile: Tile, in_dtype: str) -> int:
    """Shared memory of one pipeline stage of one CTA: its part of A and of B."""
    return (tile.cta_m + tile.load_n) * tile.k_tile * DTYPE_BYTES[in_dtype]


def direct_stage_bytes(tile: Tile, in_dtype: str) -> int:
    """Shared memory of a stage of a direct tile: its part of A and of B, and beside them 16 bytes for each row of a
    box, whatever their majors: as operands lie in global memory, a row that starts anywhere lies in so much more."""
    lines = 0
    for operand, rows in (("a", tile.cta_m), ("b", tile.mma_n)):
        lines += max(rows, tile.k_tile * (rows // load_box(tile, operand, "mn", in_dtype)[0]))
    size = stage_bytes(tile, in_dtype) + lines * CHUNK_BYTES
    return -(-size // SWIZZLE_ATOM_BYTES) * SWIZZLE_ATOM_BYTES


def direct_ctas(tile: Tile, c_major: str) -> int:
    """Of a direct tile that an SM has registers for, at least: the compiler is held to it. Four warpgroups if a thread
    has up to 128, three up to 168, two up to 255, of the SM's 65536. With 128, ptxas keeps no wgmmas in flight where 64
    columns of an m-major result are stored, whose addresses it computes beside them."""
    if tile.num_consumer_warpgroups > 1:
        return 4 // tile.num_consumer_warpgroups
    if tile.mma_n == 64 and c_major == "m" and tile.cluster_k == 1:
        return 3
    return 4 if tile.mma_n <= 64 else 3 if tile.mma_n <= 128 else 2


def direct_stages(tile: Tile, k: int | None, most: int) -> int:
    """Of the stages that a direct tile is compiled for, `most`, those that a launch has room for: all, or for a `k`
    that fits fewer, the next power of two. So several CTAs of a short sum share an SM, and a kernel is loaded for few
    sizes of shared memory. All where CTAs divide k."""
    if k is None or tile.cluster_k > 1:
        return most
    k_tiles = -(-k // tile.k_tile)
    return min(most, 1 << (k_tiles - 1).bit_length())


def exchange_bytes(tile: Tile) -> int:
    """Shared memory for a CTA's part of the sums where several divide k."""
    return 4 * tile.cta_m * tile.mma_n if tile.cluster_k > 1 else 0


def store_box_bytes(tile: Tile, out_dtype: str, target: str) -> int:
    """One store buffer of all store groups of a CTA."""
    rows = store_groups(tile, target) * store_rows(tile, target)
    return rows * store_cols(tile, out_dtype, target) * DTYPE_BYTES[out_dtype]


def epilogue_bytes(tile: Tile, out_dtype: str, target: str, moves: Moves = PLAIN) -> int:
    """Store buffers of a CTA, and of the same number and size those of matrices that have their own."""
    copies = moves.planes if family_of(target).residual_buffers else 1 + moves.matrices
    return store_buffers(tile, out_dtype, target, moves) * store_box_bytes(tile, out_dtype, target) * copies


def workspace_bytes(tile: Tile, num_clusters: int) -> int:
    """Global memory beside the operands: flags and a float32 accumulator for each CTA, where clusters share tiles."""
    return FLAG_BYTES + 4 * tile.cta_m * tile.mma_n * tile.cluster_ctas * num_clusters if tile.stream_k else 0


def num_stages(tile: Tile, in_dtype: str, out_dtype: str, arch: Arch, moves: Moves = PLAIN) -> int:
    """As many stages as shared memory allows beside the barriers and the epilogue's buffers, of which a direct tile has
    none; of its stages, DIRECT_STAGES are enough."""
    if tile.is_thin:
        return thin.num_stages(tile)
    if tile.direct:
        room = arch.smem_bytes
        if tile.cluster_k > 1:
            room = (arch.smem_bytes + CTA_BYTES) // DIRECT_SPLITS - CTA_BYTES - BARRIER_BYTES
        return min(DIRECT_STAGES, room // direct_stage_bytes(tile, in_dtype))
    free = arch.smem_bytes - BARRIER_BYTES - epilogue_bytes(tile, out_dtype, arch.target, moves)
    return free // stage_bytes(tile, in_dtype)


def smem_bytes(tile: Tile, in_dtype: str, out_dtype: str, arch: Arch, moves: Moves = PLAIN) -> int:
    """Dynamic shared memory of a launch."""
    if tile.is_thin:
        return thin.smem_bytes(tile)
    if tile.direct:
        stages = num_stages(tile, in_dtype, out_dtype, arch, moves)
        return direct_smem_bytes(tile, in_dtype, out_dtype, arch.target, stages)
    stages = num_stages(tile, in_dtype, out_dtype, arch, moves) * stage_bytes(tile, in_dtype)
    return BARRIER_BYTES + stages + epilogue_bytes(tile, out_dtype, arch.target, moves)


def acc_cols(tile: Tile) -> int:
    """TMEM columns of one accumulator of a Blackwell CTA (all `num_accs` MMA tiles of it)."""
    return tile.num_accs * (tile.mma_n // column_halves(tile))


def acc_stages(tile: Tile, tmem_cols: int = 512) -> int:
    """2 where TMEM holds two accumulators: the epilogue of one then overlaps the main loop of the other."""
    return 2 if 2 * acc_cols(tile) <= tmem_cols else 1


def tmem_cols(tile: Tile) -> int:
    """TMEM columns that a Blackwell CTA allocates: a power of two of at least 32 (PTX ISA, tcgen05.alloc)."""
    return max(32, 1 << (acc_stages(tile) * acc_cols(tile) - 1).bit_length())
