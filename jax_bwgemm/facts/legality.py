"""THE rule of what is legal: `why_not` a tile cannot compute a problem on a device. What is best is `plan`'s."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable

from jax_bwgemm.facts.arch import TARGETS, Arch, family_of
from jax_bwgemm.facts.epilogue import Epilogue, inputs
from jax_bwgemm.facts.families import FLOAT32_BITS, TMEM_LANES, Family
from jax_bwgemm.facts.geometry import cluster_tiles, operand_bytes
from jax_bwgemm.facts.padding import is_tma_storable, padded_shape, store_of
from jax_bwgemm.facts.problem import A_MAJORS, B_MAJORS, C_MAJORS, DTYPE_BYTES, FP8_DTYPES, INT8_DTYPES, Problem
from jax_bwgemm.facts.resources import (
    PLAIN,
    acc_cols,
    column_halves,
    exchange_bytes,
    load_box,
    loading_ctas,
    moves_of,
    num_stages,
    reads_a_from_registers,
    sharing_ctas,
    stage_bytes,
    store_cols,
    swizzle_atom_bytes,
)
from jax_bwgemm.facts.thin import ROWS
from jax_bwgemm.facts.tile import INT32_MAX, MAX_CLUSTER_CTAS, SWIZZLE_BYTES, THIN_COLS, Tile

MAX_MATRICES, MAX_RESULTS = 2, 3  # that an epilogue reads and makes, in registers and in buffers beside the stages
MAX_REDUCTIONS = 4  # each takes registers for the columns or the rows of a thread's box
MAX_MMA_N = 256  # PTX ISA, wgmma and tcgen05.mma shapes
MAX_CLUSTER_TILES = INT32_MAX - 65535  # a CTA's last step past the end, of as many as a grid has along z, is an int32
MAX_GRID_YZ = 65535  # CUDA C++ programming guide, technical specifications
MAX_DIRECT_BYTES = 2**30
MAX_MATRIX_BYTES = 2**40  # strides are less: CUDA driver API, cuTensorMapEncodeTiled


def why_not(tile: Tile, problem: Problem, arch: Arch) -> str | None:
    """None if `tile` can compute `problem` on `arch`, else one sentence that names the rule and the value."""
    return (
        why_not_dtypes(problem)
        or why_not_on(problem, arch)
        or why_not_epilogue(problem)
        or why_not_tile(tile, problem, arch)
        or why_not_sizes(tile, problem)
    )


def why_not_anyhow(tile: Tile, problem: Problem, archs: Iterable[Arch]) -> str | None:
    """None if `tile` computes `problem` on one of `archs` in some way: with operands of any majors, swapped or not, the
    epilogue in the kernel or behind a float32 product; else why not as it stands, on each."""
    reasons: dict[str, list[str]] = {}
    for arch in archs:
        if any(why_not(tile, way, arch) is None for way in _ways(problem)):
            return None
        reasons.setdefault(why_not(tile, problem, arch) or "", []).append(arch.name)
    return "; ".join(f"on {', '.join(names)}: {reason}" for reason, names in reasons.items())


def _ways(problem: Problem) -> Iterable[Problem]:
    alone = dataclasses.replace(problem, out_dtype="float32", epilogue=Epilogue())
    if problem.epilogue.is_gated:  # whose two products have tiles of their own
        alone = problem
    for asked, a_major, b_major in itertools.product((problem, alone), A_MAJORS, B_MAJORS):
        own = dataclasses.replace(asked, a_major=a_major, b_major=b_major)
        yield from (own, own.transposed)


def why_not_dtypes(problem: Problem) -> str | None:
    """The part of `why_not` that neither sizes nor a tile nor a device enter: what is asked before tracing."""
    a, b, out = problem.a_dtype, problem.b_dtype, problem.out_dtype
    legal_out: tuple[str, ...] = ("bfloat16", "float16", "float32", *FP8_DTYPES)
    if {a, b} <= set(INT8_DTYPES):
        legal_out = ("int32",)
        if not problem.epilogue.is_identity:
            return f"integer operands require no epilogue, got {problem.epilogue.kind}"
    elif not {a, b} <= set(FP8_DTYPES) and (a != b or a not in ("bfloat16", "float16", "float32")):
        return (
            "operands require two of float8_e4m3fn and float8_e5m2, two of int8 and uint8, or bfloat16, float16 or "
            f"float32, both the same, got {a} and {b}"
        )
    if out not in legal_out:
        return f"the result of {a} and {b} requires {' or '.join(legal_out)}, got {out}"
    majors = problem.a_major, problem.b_major, problem.c_major
    if majors[0] not in A_MAJORS or majors[1] not in B_MAJORS or majors[2] not in C_MAJORS:
        rule = f"a in {A_MAJORS}, b in {B_MAJORS} and the result in {C_MAJORS}"
        return f"majors require {rule}, got {majors[0]!r}, {majors[1]!r} and {majors[2]!r}"
    return None


def why_not_on(problem: Problem, arch: Arch) -> str | None:
    """The part of `why_not` in which the device meets dtypes and majors, but no tile and no size."""
    dtype = problem.a_dtype
    if arch.flops_per_clk(dtype) == 0:
        return f"{arch.target} has no tensor core instruction for {dtype}"
    if DTYPE_BYTES[dtype] not in arch.family.mn_major_bytes and problem.b_major != "k":
        rule = f"a k-major b for {dtype} (PTX ISA, {arch.family.instruction}; an m-major a goes through registers)"
        return f"{arch.target} requires {rule}, got {problem.b_major!r}"
    return None


def why_not_epilogue(problem: Problem) -> str | None:
    """The part of `why_not` that says what kernels do to sums: any expression of a few matrices and results."""
    epilogue = problem.epilogue
    if epilogue.num_matrices > MAX_MATRICES:
        return f"an epilogue requires at most {MAX_MATRICES} matrices to read, got {epilogue.num_matrices}"
    if len(epilogue.results) > MAX_RESULTS:
        return f"an epilogue requires at most {MAX_RESULTS} results, got {len(epilogue.results)}"
    if len(epilogue.reductions) > MAX_REDUCTIONS:
        return f"an epilogue requires at most {MAX_REDUCTIONS} reductions, got {len(epilogue.reductions)}"
    nodes = *(node for _, node in epilogue.results), *(x.node for x in epilogue.reductions)
    if any("left" in (x.role for x in inputs(node) if x.place == "acc") for node in nodes):
        return "a gated product requires one a and two b, got two a: it is not computed as its transpose"
    return None


def is_read_swapped(problem: Problem, arch: Arch) -> bool:
    """Whether the device reads the operands as they lie only as those of the transposed product, and should.

    Threads store a transposed result element by element. Where they must, the rows of a 1-byte b must be padded, too: a
    pass that transposes them on the way costs no more.
    """
    if why_not_on(problem, arch) is None:
        return False
    if DTYPE_BYTES[problem.b_dtype] == 1 and not is_tma_storable(problem):
        return False
    return why_not_on(problem.transposed, arch) is None


def why_not_tile(tile: Tile, problem: Problem, arch: Arch) -> str | None:
    """The part of `why_not` that no size enters."""
    in_bytes, out_bytes = DTYPE_BYTES[problem.a_dtype], DTYPE_BYTES[problem.out_dtype]
    if tile.k_tile * in_bytes != SWIZZLE_BYTES:
        return f"`k_tile` requires {SWIZZLE_BYTES // in_bytes} elements ({SWIZZLE_BYTES} bytes), got {tile.k_tile}"
    if tile.is_thin:
        return _why_not_cluster(tile) or _why_not_lacking(tile, arch) or _why_not_thin(tile, problem)
    if reason := _why_not_cluster(tile) or _why_not_mma(tile, problem.a_dtype, arch):
        return reason
    if reason := _why_not_sums(tile, problem, arch):
        return reason
    if store_cols(tile, problem.out_dtype, arch.target) * out_bytes < 32:
        return f"a store box requires 32 bytes of columns, got `mma_n` {tile.mma_n} for {problem.out_dtype}"
    for operand, major in (("a", problem.a_major), ("b", problem.b_major)):
        if reason := _why_not_load(tile, operand, major, problem.a_dtype, arch):
            return reason
    if reason := _why_not_promoted(tile, problem, arch):
        return reason
    if reason := _why_not_gated(tile, problem) or _why_not_symmetric(tile, problem) or _why_not_direct(tile, problem):
        return reason
    if reason := _why_not_by_rows(tile, problem):
        return reason
    moves = moves_of(tile, problem.epilogue.moves)
    if moves != PLAIN and (tile.cluster_k > 1 or not is_tma_storable(problem)):
        result = "a mirrored result" if tile.symmetric else "a second result"
        what = "a matrix that is read" if moves.matrices else "a reduction" if moves.reductions else result
        return f"{what} requires rows that TMA can step over and no split along k, got {problem} in {tile}"
    if moves.reductions and reads_a_from_registers(problem.a_dtype, problem.a_major, arch.target):
        rule = "warps with rows below each other, which those that load a into registers do not have"
        return f"a reduction requires {rule}, got {problem}"
    stages = num_stages(tile, problem.a_dtype, problem.out_dtype, arch, moves)
    if stages < 3:
        return f"a pipeline requires 3 stages in {arch.smem_bytes} bytes of shared memory, got {max(stages, 0)}"
    exchange = exchange_bytes(tile)
    if exchange > stages * stage_bytes(tile, problem.a_dtype):
        return f"`cluster_k` requires an accumulator that fits the stages it is exchanged through, got {exchange} bytes"
    return None


def needs_promotion(problem: Problem, arch: Arch) -> bool:
    """Whether the problem wants float32 sums that the device's tensor cores do not keep."""
    return problem.promoted and problem.a_dtype in FP8_DTYPES and arch.family.fp8_sum_bits < FLOAT32_BITS


def _why_not_promoted(tile: Tile, problem: Problem, arch: Arch) -> str | None:
    is_needed = needs_promotion(problem, arch)
    if is_needed and not tile.promoted:
        return f"promoted sums require a tile with `promoted`, got {problem} in {tile}"
    if tile.promoted and not is_needed:
        rule = f"float8 operands, {_having('promoted')} and the algorithm ANY_F8_ANY_F8_F32"
        return f"`promoted` requires {rule}, got {problem} in {tile}"
    if tile.promoted and (tile.pingpong or tile.cluster_k > 1 or tile.stream_k):
        return f"`promoted` requires no ping-pong and no split along k, got {tile}"
    return None


def _why_not_gated(tile: Tile, problem: Problem) -> str | None:
    """Each b has half of the columns, in whole swizzle spans."""
    is_gated = problem.epilogue.is_gated
    if tile.gated != is_gated:
        return f"`gated` requires {is_gated} for {problem}, got {tile}"
    if is_gated and (tile.mma_n % 128 or tile.cluster_k > 1 or tile.promoted):
        return f"`gated` requires 128 or 256 columns, no split along k and no promoted sums, got {tile}"
    if is_gated and column_halves(tile) > 1:
        return f"`gated` requires a pair with mma_m 256, whose threads have all columns of their rows, got {tile}"
    return None


def _why_not_symmetric(tile: Tile, problem: Problem) -> str | None:
    """A symmetric tile needs a symmetric product. Any other tile computes one, too, if it sums elements (i, j) and
    (j, i) alike, so that their bits are the same: clusters that share tiles would divide k elsewhere for the other."""
    if tile.stream_k and problem.symmetric and not tile.symmetric:
        return f"a symmetric result requires one order of summation, and `stream_k` has several, got {tile}"
    if not tile.symmetric:
        return None
    if not problem.symmetric:
        return f"`symmetric` requires a product of a matrix and its own transpose, got {problem}"
    if tile.span[0] != tile.span[1]:
        size = "x".join(map(str, tile.span))
        return f"`symmetric` requires cluster tiles as tall as they are wide, got {size} in {tile}"
    if tile.cluster_k > 1 or tile.gated or tile.promoted:
        return f"`symmetric` requires no split along k, one b and no promoted sums, got {tile}"
    if (problem.a_major, problem.b_major, problem.c_major) not in (("k", "k", "n"), ("m", "n", "n")):
        return f"`symmetric` requires a and its transpose as they lie, for an n-major result, got {problem}"
    if problem.epilogue.moves[1:] != PLAIN[1:] or any(x.place != "mn" for x in problem.epilogue.operands):
        return f"`symmetric` requires an epilogue of scalars and matrices with one result, got {problem.epilogue.kind}"
    return None


def _why_not_direct(tile: Tile, problem: Problem) -> str | None:
    """A CTA is alone with its tile, and MMAs read both operands from shared memory, whatever their majors."""
    if not tile.direct:
        return None
    if tile.cluster_ctas > tile.cluster_k or tile.pingpong or tile.stream_k or tile.gated or tile.symmetric:
        rule = "a cluster of one or along k, no ping-pong, no stream_k, one b and all tiles"
        return f"`direct` requires {rule}, got {tile}"
    if DTYPE_BYTES[problem.a_dtype] != 2:
        return f"`direct` requires operands of 2 bytes, got {problem.a_dtype}"
    if problem.epilogue.moves != PLAIN:
        return f"`direct` requires an epilogue without matrices and with one result, got {problem.epilogue.kind}"
    return None


def _why_not_thin(tile: Tile, problem: Problem) -> str | None:
    """Threads hold the matrix in registers and store sums as they are, of all of k."""
    if reason := _why_not_direct(tile, problem):
        return reason
    rows = ROWS[problem.a_major]
    if tile.cta_m != rows or tile.num_accs > 1 or tile.by_rows or tile.promoted:
        rule = f"{rows} rows of a matrix that is {problem.a_major}-major, one accumulator and no `by_rows`"
        return f"{THIN_COLS} columns require {rule}, got {tile}"
    if tile.cta_m % tile.cluster_k:
        return f"`cluster_k` requires a divisor of {tile.cta_m} rows, which its CTAs share out, got {tile.cluster_k}"
    if not problem.epilogue.is_identity or problem.whole_k:
        return f"{THIN_COLS} columns require no epilogue and all of k, got {problem}"
    return None


def _why_not_by_rows(tile: Tile, problem: Problem) -> str | None:
    """What warps store rows of: sums alone, in registers, whose boxes no other tile has."""
    if not tile.by_rows:
        return None
    if problem.c_major != "n" or problem.epilogue.moves != PLAIN or tile.symmetric or tile.direct:
        rule = "rows of one n-major result that nothing is added to, of all tiles, and loads by TMA"
        return f"`by_rows` requires {rule}, got {problem} in {tile}"
    return None


def _why_not_cluster(tile: Tile) -> str | None:
    sizes = tile.cluster_m, tile.cluster_n, tile.cluster_k
    if any(size < 1 or size & (size - 1) for size in sizes) or tile.cluster_ctas > MAX_CLUSTER_CTAS:
        got = "x".join(map(str, sizes))
        return f"a cluster requires powers of two and at most {MAX_CLUSTER_CTAS} CTAs, got {got}"
    if tile.cluster_m % tile.cta_group:
        return f"`cluster_m` requires a multiple of cta_group {tile.cta_group}, got {tile.cluster_m}"
    if tile.stream_k and (tile.cluster_k > 1 or tile.pingpong):
        return f"`stream_k` requires cluster_k 1 and no ping-pong, got {tile}"
    if tile.cluster_k > 1 and (tile.cluster_m, tile.cluster_n, tile.num_accs) != (tile.cta_group, 1, 1):
        return f"`cluster_k` above 1 requires cluster {tile.cta_group}x1 and one accumulator, got {tile}"
    return None


def _why_not_load(tile: Tile, operand: str, major: str, in_dtype: str, arch: Arch) -> str | None:
    """A multicast splits a box between CTAs that share it: whole 8-row swizzle atoms each. Where MMAs commit, kernels
    are written for each CTA to load a part."""
    contiguous, other = load_box(tile, operand, major, in_dtype)
    if contiguous * DTYPE_BYTES[in_dtype] < 32:
        return f"operand {operand} requires {major}-major rows of 32 bytes a CTA, got {tile}"
    if swizzle_atom_bytes(in_dtype, major, arch.target) == 32 and contiguous * DTYPE_BYTES[in_dtype] != 128:
        return f"a {major}-major float32 operand {operand} requires a multiple of 32 {major} a CTA, got {tile}"
    if other % 8 or other == 0:
        rule = "a multiple of 8 rows for each CTA that loads a part of it"
        return f"operand {operand} requires {rule}, got {other} in {tile}"
    loading, sharing = loading_ctas(tile, operand, major), sharing_ctas(tile, operand)
    if loading < sharing and arch.family.commits:
        rule = f"a multiple of 8 rows for each of the {sharing} CTAs that share it on {arch.target}"
        return f"operand {operand} requires {rule}, got {loading * other} in {tile}"
    return None


def _why_not_lacking(tile: Tile, arch: Arch) -> str | None:
    for field, why in arch.family.lacks.items():
        if getattr(tile, field):
            return f"`{field}` requires {_having(field)}: {why}, got True"
    return None


def _why_not_mma(tile: Tile, in_dtype: str, arch: Arch) -> str | None:
    """What the family's kernels have, and how many rows and columns their MMAs."""
    of, pairs = arch.family, tile.cta_group
    if reason := _why_not_lacking(tile, arch):
        return reason
    if pairs not in of.mma_rows:
        return f"`cta_group` requires {_legal_groups(of, arch.target)}, got {pairs}"
    if tile.pingpong and tile.cluster_k > 1:
        return f"`pingpong` requires cluster_k 1 (a split stores through the stages), got {tile.cluster_k}"
    where = f"for cta_group {pairs}" if len(of.mma_rows) > 1 else f"on {arch.target}"
    legal_m = of.pingpong_rows if tile.pingpong else of.mma_rows[pairs]
    if tile.mma_m not in legal_m:
        return f"`mma_m` requires one of {legal_m} {where}, got {tile.mma_m}"
    step = of.mma_cols_step * pairs
    if tile.mma_n % step or not step <= tile.mma_n <= MAX_MMA_N:
        return f"`mma_n` requires a multiple of {step} in {step}..{MAX_MMA_N} {where}, got {tile.mma_n}"
    words = of.float32_cols_step
    if in_dtype == "float32" and tile.mma_n % words and tile.mma_n != step:
        return f"`mma_n` requires {step} or a multiple of {words} for float32 on {arch.target}, got {tile.mma_n}"
    return None


def _why_not_sums(tile: Tile, problem: Problem, arch: Arch) -> str | None:
    """Whether accumulators fit where they are: in registers or in TMEM."""
    of = arch.family
    if not of.sums_in_tmem:
        return _why_not_registers(tile, problem, of, arch.target)
    if not 1 <= tile.num_accs <= of.max_accs or (tile.num_accs > 1 and tile.mma_m // tile.cta_group != TMEM_LANES):
        rule = f"1, or {of.max_accs} where an MMA fills the {TMEM_LANES} TMEM lanes"
        return f"`num_accs` requires {rule}, got {tile.num_accs} for mma_m {tile.mma_m}"
    if (cols := acc_cols(tile)) > arch.tmem_cols:
        return f"accumulators require at most {arch.tmem_cols} TMEM columns, got {cols}"
    return None


def _why_not_registers(tile: Tile, problem: Problem, of: Family, target: str) -> str | None:
    if tile.num_accs != of.max_accs:
        return f"`num_accs` requires {of.max_accs} on {target} (its accumulators are registers), got {tile.num_accs}"
    warpgroups = tile.num_consumer_warpgroups
    regs = tile.mma_m * tile.mma_n // (128 * (1 if tile.pingpong else warpgroups))
    most = of.acc_registers[warpgroups] // (2 if tile.promoted else 1)
    if regs <= most or (_is_bare(tile, problem, target) and regs <= of.bare_acc_registers[warpgroups]):
        return None
    bare = of.bare_acc_registers[warpgroups]
    unless = f" ({bare} in a kernel that only multiplies)" if most < regs <= bare and not tile.promoted else ""
    size = f"{tile.mma_m}x{tile.mma_n}"
    return f"an accumulator requires at most {most} registers a thread{unless}, got {regs} for {size}"


def _is_bare(tile: Tile, problem: Problem, target: str) -> bool:
    """Whether a kernel rounds its sums, 2 bytes or more each, and leaves the rest to TMA: nothing else takes registers
    from them."""
    needs = tile.stream_k or tile.promoted or reads_a_from_registers(problem.a_dtype, problem.a_major, target)
    only_rounds = problem.epilogue.is_identity and DTYPE_BYTES[problem.out_dtype] > 1
    return only_rounds and store_of(tile, problem) == "tma" and not needs


def _legal_groups(of: Family, target: str) -> str:
    legal = " or ".join(map(str, of.mma_rows))
    return legal if len(of.mma_rows) > 1 else f"{legal} on {target} (CTA pairs came with Blackwell)"


def _having(field: str) -> str:
    """The targets whose kernels have what a field of a tile asks."""
    return " or ".join(target for target in TARGETS if field not in family_of(target).lacks)


def why_not_sizes(tile: Tile, problem: Problem) -> str | None:
    """The part of `why_not` that the device does not enter: what a kernel and a launch can count. The launcher has the
    limits of a launch too (`ffi/launch_plan.cc`), for programs that were planned elsewhere."""
    spans = {"m": tile.cluster_m * tile.cta_m, "n": tile.cluster_n * tile.mma_n, "k": tile.k_tile, "batch": 1}
    for name, span in spans.items():
        size, most = getattr(problem, name), INT32_MAX // span * span  # kernels count whole tiles
        if not 1 <= size <= most:
            return f"`{name}` requires 1..{most}, got {size}"
    if problem.out_dtype == "int32":  # the tensor cores clamp where XLA wraps around
        largest = math.prod(255 if dtype == "uint8" else 128 for dtype in (problem.a_dtype, problem.b_dtype))
        if problem.k > INT32_MAX // largest:
            return f"`k` requires at most {INT32_MAX // largest}, beyond which sums could leave int32, got {problem.k}"
    tiles_m, tiles_n = cluster_tiles(tile, problem)
    if tiles_m * tiles_n * problem.batch > MAX_CLUSTER_TILES:
        got = f"{tiles_m} x {tiles_n} x {problem.batch}"
        return f"a launch requires at most {MAX_CLUSTER_TILES} cluster tiles, got {got}: split the batch"
    return _why_not_direct_sizes(tile, problem) if tile.direct else _why_not_matrices(problem)


def _why_not_direct_sizes(tile: Tile, problem: Problem) -> str | None:
    """What its grid counts along y and z, and its threads in int32 offsets, beyond an operand's end, too."""
    tiles_m, tiles_n = cluster_tiles(tile, problem)
    along_y = ("tiles along m", tiles_m) if problem.c_major == "n" else ("tiles along n", tiles_n)
    along_z = problem.batch * tile.cluster_k
    for name, size in (along_y, ("matrices of a batch, times `cluster_k`,", along_z)):
        if size > MAX_GRID_YZ:
            return f"`direct` requires at most {MAX_GRID_YZ} {name}, got {size}"
    for name, size in zip(("a", "b"), operand_bytes(problem), strict=True):
        if size > MAX_DIRECT_BYTES:
            return f"`direct` requires at most {MAX_DIRECT_BYTES} bytes of `{name}`, got {size}"
    return None


def _why_not_matrices(problem: Problem) -> str | None:
    """As TMA steps through them: operands with their padding, and a result that it stores."""
    dtypes = {"a": problem.a_dtype, "b": problem.b_dtype}
    matrices = [(f"`{x}`", padded_shape(problem, x), dtype) for x, dtype in dtypes.items()]
    if is_tma_storable(problem):
        rows, elements = (problem.m, problem.n) if problem.c_major == "n" else (problem.n, problem.m)
        matrices.append(("the result", (problem.batch, rows, elements), problem.out_dtype))
    for name, (_, rows, elements), dtype in matrices:
        row_bytes = elements * DTYPE_BYTES[dtype]
        if elements > INT32_MAX:
            return f"padding requires rows of at most {INT32_MAX} elements, got {elements} for {name}"
        if rows * row_bytes >= MAX_MATRIX_BYTES:
            got = f"{rows} rows of {row_bytes} bytes for {name}"
            return f"TMA requires a matrix of less than 2^40 bytes, got {got}: split it"
    return None
