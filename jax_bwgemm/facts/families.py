"""GPUs whose kernels are compiled from one source: one frozen record a family, every fact with its source. Knows no
device, tile or problem.

What differs between families is asked here, by the fact that makes the difference; who asks for a family's name asks
which list is its own. Another family is another record, its devices in `arch`, its tiles in `shipped`, its kernels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jax_bwgemm.facts.constants import BLACKWELL_CONSTANTS, HOPPER_CONSTANTS, Constants

TMEM_LANES = 128  # PTX ISA, tensor memory
FLOAT32_BITS = 24  # of a float32's mantissa


@dataclasses.dataclass(frozen=True)
class Opcodes:
    """SASS, as nvdisasm writes it. MMAs are those of floats of 2 or 4 bytes, of floats of 1 byte, and of integers; and
    those whose `fragments` are in registers, "" where no kernel has them.

    `wait` is what ptxas puts behind each MMA where it serialises them, "" where it never does. `demanded`: what every
    kernel has, beside its MMA. `counted`: what the build counts, modifiers included.
    """

    half: str
    quarter: str
    integer: str
    fragments: str
    wait: str
    demanded: tuple[str, ...]
    counted: tuple[str, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Family:
    """Facts of a family's tensor cores, and of our kernels for them. Lengths are in elements.

    What a tile may be. `mma_rows`: its `mma_m`, by `cta_group`; `pingpong_rows`: that of a ping-pong. `slab_rows`: rows
    of one MMA where several lie side by side in a tile; 0 where one has them all. `mma_cols_step`: of its `mma_n`, for
    each CTA of a pair; `float32_cols_step`: the same of float32 and more than one step. `max_accs`: MMA tiles along m
    that may share a stage of B. `lacks`: its fields that no kernel of the family has, and why.

    Where sums are. `acc_registers`: of a thread, at most, for an accumulator, by how many warpgroups multiply; none
    where accumulators are in TMEM. `bare_acc_registers`: the same of a kernel that does nothing else with
    registers. `held_registers`: of a thread, at most, for sums and a rounded result that waits there for the next main
    loop; none where none waits. `fp8_sum_bits`: of the mantissa of a float8 product's sum.

    Operands. `mn_major_bytes`: sizes of elements that MMAs read from shared memory other than k-major;
    `word_atom_bytes`: what a swizzle moves as a whole of such elements of 4 bytes.

    Warps. `load_warps`, `mma_warps`, `residual_warps`: those that do nothing else (the last, where there is a
    residual). `commits`: arrivals that free a stage come from the MMAs themselves, asynchronously. `residual_buffers`:
    store buffers of a store group, at most, into which a residual is loaded, so that the result replaces it there; 0
    where it has buffers of its own. `boxes_a_store`: how many boxes that lie side by side one TMA store takes, at most.
    `few_stages`: so many or fewer keep the tensor cores waiting for loads; they are released as soon as possible, and
    one more is worth store buffers; 0 where MMAs release stages themselves.

    Preferences that were measured, if any was: `raster_order`, `lets_results_go`: those that do not fit into the L2
    cache (`order.result_hint`), and `neighbours_share`: what tiles of one GPC read alike crosses to it once
    (`order.raster`).
    """

    name: str
    targets: tuple[str, ...]
    instruction: str
    mma_rows: Mapping[int, tuple[int, ...]]
    pingpong_rows: tuple[int, ...]
    slab_rows: int
    mma_cols_step: int
    float32_cols_step: int
    max_accs: int
    lacks: Mapping[str, str]
    acc_registers: Mapping[int, int]
    bare_acc_registers: Mapping[int, int]
    held_registers: Mapping[int, int]
    fp8_sum_bits: int
    mn_major_bytes: tuple[int, ...]
    word_atom_bytes: int
    load_warps: int
    mma_warps: int
    residual_warps: int
    commits: bool
    residual_buffers: int
    boxes_a_store: int
    few_stages: int
    raster_order: str
    lets_results_go: bool
    neighbours_share: bool
    opcodes: Opcodes
    constants: Constants

    @property
    def sums_in_tmem(self) -> bool:
        """Whether warps other than those that multiply read the accumulators."""
        return not self.acc_registers

    @property
    def multiplies_while_storing(self) -> bool:
        """Whether a CTA's tensor cores and loads go on while it stores: other warps issue the MMAs."""
        return self.mma_warps > 0


HOPPER = Family(
    name="hopper",
    targets=("sm_90a",),
    instruction="wgmma.mma_async",
    mma_rows={1: (64, 128, 192, 256)},  # one, two or three warpgroups, or two of two slabs
    pingpong_rows=(64, 128),
    slab_rows=64,  # PTX ISA, wgmma shapes: m64
    mma_cols_step=16,  # wgmma's is 8
    float32_cols_step=32,  # CuTeDSL 4.8.1 aborts on 48, 80, ...
    max_accs=1,
    lacks={},
    acc_registers={1: 128, 2: 128, 3: 80},  # of float32 64x256, 128x128 and 64x160: no variant spills
    bare_acc_registers={1: 128, 2: 192, 3: 96},  # 64x256, 128x192 and 64x192
    held_registers={1: 192, 2: 192, 3: 112},  # no variant spills
    fp8_sum_bits=12,  # about so many
    mn_major_bytes=(2,),  # PTX ISA, wgmma.mma_async; an A of other sizes may come from registers
    word_atom_bytes=16,
    load_warps=4,  # a warpgroup, for setmaxnreg is one's
    mma_warps=0,  # the consumers, which store as well
    residual_warps=0,  # of the load warps, which are idle otherwise
    commits=False,
    residual_buffers=8,  # all boxes of a 64x256 or 128x128 tile of 2 bytes
    boxes_a_store=2,  # rows of 128 bytes: on an H100 3 to 16 % faster where rows end within sectors (docs/hopper.md)
    few_stages=5,  # 2 to 7 % faster on an H200; tiles of six and more are as before, or 1 % slower (docs/hopper.md)
    raster_order="snake",  # on an H200 as fast as groups, or a little faster, for each of five large products
    lets_results_go=True,  # on an H100 6 to 16 % faster where stores take the time, else level (docs/hopper.md)
    neighbours_share=True,  # on an H200 (docs/hopper.md)
    opcodes=Opcodes(
        half="HGMMA",
        quarter="QGMMA",
        integer="IGMMA",
        fragments="HMMA",
        wait="WARPGROUP.DEPBAR",
        demanded=(),
        counted=(
            "HGMMA", "QGMMA", "IGMMA", "HMMA", "WARPGROUP.DEPBAR", "UTMALDG", "UTMALDG.MULTICAST", "UTMASTG", "STG",
            "STG.128", "LDGSTS", "LDGSTS.128", "LDS", "LDS.128", "LDSM", "STL", "LDL",
        ),
    ),
    constants=HOPPER_CONSTANTS,
)  # fmt: skip

BLACKWELL = Family(
    name="blackwell",
    targets=("sm_100f", "sm_100a"),
    instruction="tcgen05.mma",
    mma_rows={1: (64, 128), 2: (128, 256)},  # PTX ISA, tcgen05.mma shapes
    pingpong_rows=(),
    slab_rows=0,
    mma_cols_step=16,  # PTX ISA, tcgen05.mma shapes; half of B must be whole 8-column groups
    float32_cols_step=16,
    max_accs=2,
    lacks={
        "direct": "the Blackwell kernel loads by TMA",
        "pingpong": "a Blackwell epilogue overlaps through TMEM",
        "promoted": "Blackwell's tensor cores sum in float32",
        "stream_k": "the Blackwell kernel has no workspace yet",
    },
    acc_registers={},
    bare_acc_registers={},
    held_registers={},
    fp8_sum_bits=FLOAT32_BITS,
    mn_major_bytes=(1, 2, 4),
    word_atom_bytes=32,  # PTX ISA, tcgen05 shared memory layout, 128-byte swizzle with 32-byte atomicity
    load_warps=1,
    mma_warps=1,
    residual_warps=1,
    commits=True,  # tcgen05.commit
    residual_buffers=0,
    boxes_a_store=1,  # not measured
    few_stages=0,
    raster_order="groups",  # nothing is measured
    lets_results_go=False,  # not measured
    neighbours_share=False,  # not measured
    opcodes=Opcodes(
        half="UTCHMMA",
        quarter="UTCQMMA",
        integer="UTCIMMA",
        fragments="",
        wait="",
        demanded=("LDTM", "UTCBAR"),
        counted=(
            "UTCHMMA", "UTCHMMA.2CTA", "UTCQMMA", "UTCQMMA.2CTA", "UTCIMMA", "UTCIMMA.2CTA", "UTCBAR", "UTCBAR.2CTA",
            "UTCBAR.MULTICAST", "UTMALDG", "UTMALDG.2CTA", "UTMALDG.MULTICAST", "UTMASTG", "STG", "STG.128",
            "LDTM", "STL", "LDL",
        ),
    ),
    constants=BLACKWELL_CONSTANTS,
)  # fmt: skip

FAMILIES = (HOPPER, BLACKWELL)
