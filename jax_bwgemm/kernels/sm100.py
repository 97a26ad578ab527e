"""Blackwell GEMM: warp-specialised, persistent, TMA + tcgen05, one CTA or a CTA pair (cta_group 2).

Timetable of a CTA (6 warps; 7 with a residual):

    warps 0..3   store     TMEM -> registers -> epilogue -> smem box -> TMA store; warp 0 also owns the TMEM
    warp 4       multiply  issues tcgen05.mma for the CTA or, in a pair's even CTA, for both (the odd one's is idle)
    warp 5       load      TMA of this CTA's rows of A and columns of B, for one tile after the other
    warp 6       residual  TMA of the boxes of the residual, in the order in which the store warps add them

    pipeline   producer -> consumer   filled by                        emptied by
    ab         load -> multiply       one expect_tx arrival in the     tcgen05.commit of every issuer that shares
                                      leader and the bytes of A and    the stage, multicast to both CTAs of a pair
                                      B of both CTAs
    acc        multiply -> store      tcgen05.commit, to both CTAs     one lane of each store warp, of both CTAs,
                                                                       at the leader
    residual   residual -> store      one expect_tx arrival, the       one lane of each store warp
                                      bytes of all groups' boxes
    store      store -> TMA           the group's threads, fence,      cp.async.bulk.wait_group.read in the group's
                                      barrier                          first warp

Where TMEM holds two accumulators, the store warps drain one while the MMAs of the next tile fill the other. A pair
frees its TMEM behind a barrier of its own (`freed`): neither CTA leaves while the other still reads. A split along k
adds the barriers of `split_k`; its load warp waits for `drained` after each tile. Where TMA cannot step over the
result's rows, each store warp stores its own (`row_store`). Every warp passes griddepcontrol.wait before it touches
global memory; the load warp releases the next kernel when its last load is on its way.

Here is the kernel, with its load and multiply roles; the store and residual roles are in `sm100_store`, which reads
accumulators as `sm100_tmem` says.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.utils.blackwell_helpers as sm100
from cutlass import Float32, Int32, Int64, cute, pipeline
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05

from jax_bwgemm.facts.variant import Variant
from jax_bwgemm.kernels import pipelines, split_k
from jax_bwgemm.kernels.gemm import facts_of
from jax_bwgemm.kernels.load import feeds, keep_full
from jax_bwgemm.kernels.params import Hints, Maps, Order, Params, Sizes
from jax_bwgemm.kernels.sm100_store import STORE_THREADS, ResidualRole, Shared, StoreRole
from jax_bwgemm.kernels.sm100_tmem import Tmem
from jax_bwgemm.kernels.split_k import KSplit
from jax_bwgemm.kernels.start import enter
from jax_bwgemm.kernels.walk import Walk, walk_of

MULTIPLY_WARP = pipelines.EPILOGUE_WARPS
LOAD_WARP = MULTIPLY_WARP + 1
RESIDUAL_WARP = LOAD_WARP + 1
ALL_STORE_BARRIER = 1  # named barriers: the store warps among themselves,
TMEM_BARRIER = 2  # the store warps with the multiply warp, once the TMEM address is known;
GROUP_BARRIER = 3  # the store groups' come behind them


class Sm100Gemm:
    """One variant. Everything on self is fixed at compile time; sizes are run-time parameters."""

    def __init__(self, variant: Variant) -> None:
        facts = self.facts = facts_of(variant)
        tile = facts.tile
        self.stages = facts.stages
        self.epilogue = facts.epilogue
        self.tmem = Tmem(tile, facts.boxes)
        self.tiler = (tile.num_accs * tile.mma_m, tile.mma_n, tile.k_tile)
        self.store = StoreRole(facts, self.tmem, GROUP_BARRIER)
        self.residual = ResidualRole(facts)

    # Objects that are functions of the tile alone, made alike on the host and in the kernel.

    def tiled_mma(self) -> cute.TiledMma:
        tile = self.facts.tile
        group = tcgen05.CtaGroup.TWO if tile.cta_group == 2 else tcgen05.CtaGroup.ONE
        return self._mma(group, (tile.mma_m, tile.mma_n))

    def _mma(self, group: tcgen05.CtaGroup, shape: tuple[int, int]) -> cute.TiledMma:
        facts = self.facts
        majors = [
            OperandMajorMode.K if major == "k" else OperandMajorMode.MN for major in (facts.a_major, facts.b_major)
        ]
        if facts.acc_dtype is Int32:  # the helper below wants both of one sign, which kind::i8 does not
            op = tcgen05.MmaI8Op(facts.a_dtype, (*shape, 32), group, tcgen05.OperandSource.SMEM, *majors)
            object.__setattr__(op, "b_dtype", facts.b_dtype)
            return cute.make_tiled_mma(cute.make_mma_atom(op))
        return sm100.make_trivial_tiled_mma(facts.a_dtype, facts.b_dtype, *majors, facts.acc_dtype, group, shape)

    def smem_layouts(self, mma: cute.TiledMma) -> tuple[Any, Any]:
        """One CTA's part: A (MMA, MMA_M, MMA_K, stages) and B (MMA, MMA_N, MMA_K, stages)."""
        a = sm100.make_smem_layout_a(mma, self.tiler, self.facts.a_dtype, self.stages)
        return a, sm100.make_smem_layout_b(mma, self.tiler, self.facts.b_dtype, self.stages)

    def b_loader(self) -> tuple[cute.TiledMma, tuple[int, int, int]]:
        """By whose layouts a b is loaded, and its tiler: the MMA's own; or, for half of its columns, one CTA's."""
        tile = self.facts.tile
        if not tile.gated:
            return self.tiled_mma(), self.tiler
        shape = tile.mma_m // tile.cta_group, tile.out_n
        return self._mma(tcgen05.CtaGroup.ONE, shape), (*shape, tile.k_tile)

    def b_parts(self, sB: cute.Tensor) -> tuple[cute.Tensor, ...]:
        """Of each b, whose columns lie side by side, (MMA, MMA_N, MMA_K, stage); a pair's CTA has one."""
        tile = self.facts.tile
        if not tile.gated or tile.cta_group == 2:
            return (sB,)
        loader, tiler = self.b_loader()
        one = sm100.make_smem_layout_b(loader, tiler, self.facts.b_dtype, 1).outer
        shape = cute.shape(one)[:3]
        return tuple(cute.local_tile(sB, shape, (i, 0, 0, None)) for i in range(tile.num_bs))

    def cluster_layout(self, mma: cute.TiledMma) -> Any:
        """(V, M, N, K) of the cluster: V counts the CTAs of a pair, M the pairs."""
        return cute.tiled_divide(cute.make_layout(self.facts.cluster), (mma.thr_id,))

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,
        b: cute.Tensor,
        c: cute.Tensor,
        sizes: Sizes,
        order: Order,
        hints: Hints,
        alpha: Float32,
        bias: cute.Pointer,
    ) -> None:
        """Makes TMA atoms from tensors (m, k, l), (n, k, l), (m, n, l). Only types matter: our launcher replaces this
        host code; a test compares what both pack. Flat, for the DSL's C header takes no tuple of several types."""
        facts = self.facts
        mma = self.tiled_mma()
        a_smem = cute.slice_(self.smem_layouts(mma)[0], (None, None, None, 0))
        loader, b_tiler = self.b_loader()
        b_smem = cute.slice_(sm100.make_smem_layout_b(loader, b_tiler, facts.b_dtype, 1), (None, None, None, 0))
        vmnk = self.cluster_layout(mma)
        a_op = sm100.cluster_shape_to_tma_atom_A(facts.cluster[:2], mma.thr_id)
        tma_a, _ = cute.nvgpu.make_tiled_tma_atom_A(a_op, a, a_smem, self.tiler, mma, vmnk.shape)
        b_op = sm100.cluster_shape_to_tma_atom_B(facts.cluster[:2], mma.thr_id)
        tma_bs = [
            cute.nvgpu.make_tiled_tma_atom_B(b_op, b, b_smem, b_tiler, loader, vmnk.shape)[0]
            for _ in range(facts.tile.num_bs)
        ]
        matrices = [facts.boxes.load_atom(c) for _ in range(facts.moves.matrices)]
        maps = Maps(tma_a, tuple(tma_bs), facts.store_atoms(c), tuple(matrices))
        self.tma_boxes = maps.boxes(facts.boxes.store)
        params = Params(maps, sizes, order, hints, None, facts.epilogue_args(alpha, bias))
        self.kernel(params).launch(
            grid=facts.cluster, block=(facts.threads, 1, 1), cluster=facts.cluster, min_blocks_per_mp=1
        )

    @cute.kernel
    def kernel(self, params: Params) -> None:
        facts, tile, tmem, maps = self.facts, self.facts.tile, self.tmem, params.maps
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_idx == LOAD_WARP:
            for atom in maps.moved(facts.boxes.store)[: 1 + tile.num_bs + facts.moves.results]:
                cpasync.prefetch_descriptor(atom)

        mma = self.tiled_mma()
        a_smem, b_smem = self.smem_layouts(mma)
        c_smem = facts.boxes.layout(facts.boxes.groups, facts.boxes.buffers)
        allocator = cutlass.memory.SmemAllocator()
        ab_barriers = allocator.allocate_array(Int64, 2 * facts.stages)
        acc_barriers = allocator.allocate_array(Int64, 2 * tmem.stages)
        freed = allocator.allocate_array(Int64, 1)
        written = allocator.allocate_array(Int64, 1)
        drained = allocator.allocate_array(Int64, 1)
        residual_barriers = allocator.allocate_array(Int64, 2 * facts.boxes.buffers)
        tmem_address = allocator.allocate_array(Int32, 1)
        sA = allocator.allocate_tensor(facts.a_dtype, a_smem.outer, 1024, a_smem.inner)
        sB = allocator.allocate_tensor(facts.b_dtype, b_smem.outer, 1024, b_smem.inner)
        sC = allocator.allocate_tensor(facts.boxes.dtype, c_smem.outer, 1024, c_smem.inner)

        threads = pipeline.Agent.Thread
        vmnk = self.cluster_layout(mma)
        ab = pipeline.PipelineTmaUmma.create(
            barrier_storage=ab_barriers,
            num_stages=facts.stages,
            producer_group=pipeline.CooperativeGroup(threads),
            consumer_group=pipeline.CooperativeGroup(threads, pipelines.blackwell_empty_arrivals(tile)),
            tx_count=facts.full_bytes,
            cta_layout_vmnk=vmnk,
            defer_sync=True,
        )
        acc = pipeline.PipelineUmmaAsync.create(
            barrier_storage=acc_barriers,
            num_stages=tmem.stages,
            producer_group=pipeline.CooperativeGroup(threads),
            consumer_group=pipeline.CooperativeGroup(threads, pipelines.acc_empty_arrivals(tile)),
            cta_layout_vmnk=vmnk,
            defer_sync=True,
        )
        residual, sRs = None, ()
        if cutlass.const_expr(facts.moves.matrices):
            residual = pipeline.PipelineTmaAsync.create(
                barrier_storage=residual_barriers,
                num_stages=facts.boxes.buffers,
                producer_group=pipeline.CooperativeGroup(threads),
                consumer_group=pipeline.CooperativeGroup(threads, pipelines.residual_empty_arrivals()),
                tx_count=facts.residual_bytes,
                cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),  # every CTA of a cluster loads its own
                defer_sync=True,
            )
            sRs = tuple(
                allocator.allocate_tensor(facts.boxes.dtype, c_smem.outer, 1024, c_smem.inner)
                for _ in range(facts.moves.matrices)
            )
        if warp_idx == 0:
            with cute.arch.elect_one():
                if cutlass.const_expr(tile.cta_group == 2):
                    cute.arch.mbarrier_init(freed, 1)
                if cutlass.const_expr(tile.cluster_k > 1):
                    split_k.init_barriers(written, drained, tile, pipelines.EPILOGUE_WARPS)
        pipeline.pipeline_init_arrive(cluster_shape_mn=facts.cluster, is_relaxed=True)
        walk = walk_of(tile, params)
        parts = cute.recast_ptr(sA.iterator, swizzle_=None, dtype=facts.acc_dtype)
        split = KSplit(tile, walk.x, STORE_THREADS, parts, written, drained)
        shared = Shared(sA, sB, sC, sRs, ab, acc, residual, split)

        if warp_idx == LOAD_WARP:
            self.load(params, shared, walk)
        elif warp_idx == MULTIPLY_WARP:
            enter(facts.cluster)
            cute.arch.barrier(barrier_id=TMEM_BARRIER, number_of_threads=STORE_THREADS + 32)
            address = self.tmem_pointer(tmem_address)
            self.multiply(mma, cute.make_tensor(address, tmem.mma_layout(mma)), shared, walk)
        elif warp_idx == RESIDUAL_WARP:  # without one, there is no such warp
            enter(facts.cluster)
            if cutlass.const_expr(facts.moves.matrices):
                self.residual.run(params, shared, walk)
        else:
            enter(facts.cluster)
            if warp_idx == 0:
                tmem.allocate(tmem_address)
            cute.arch.barrier(barrier_id=TMEM_BARRIER, number_of_threads=STORE_THREADS + 32)
            address = self.tmem_pointer(tmem_address)
            self.store.run(params, shared, cute.make_tensor(address, tmem.lane_layout()), walk)
            cute.arch.barrier(barrier_id=ALL_STORE_BARRIER, number_of_threads=STORE_THREADS)  # all four have read
            if warp_idx == 0:
                tmem.free(address, freed)

    def tmem_pointer(self, tmem_address: cute.Pointer) -> cute.Pointer:
        """What `tmem_address` holds by now."""
        return cute.arch.retrieve_tmem_ptr(self.facts.acc_dtype, alignment=16, ptr_to_buffer_holding_addr=tmem_address)

    @cute.jit
    def load(self, params: Params, shared: Shared, walk: Walk) -> None:
        """The load warp of either CTA: its half of the pair's A and B (`half`), into the stages of its own smem."""
        tile, maps = self.facts.tile, params.maps
        mA, mB, _ = self.facts.coordinate_tensors(params.sizes)
        pairs_m = cute.make_layout(tile.cluster_m // tile.cta_group)
        half = self.tiled_mma().get_slice(walk.x % tile.cta_group)
        tA = half.partition_A(cute.local_tile(mA, (self.tiler[0], tile.k_tile), (None, None, None)))
        loader, b_tiler = self.b_loader()
        columns = half if cutlass.const_expr(not tile.gated) else loader.get_slice(0)
        tB = columns.partition_B(cute.local_tile(mB, b_tiler[1:], (None, None, None)))
        sA = cute.group_modes(shared.sA, 0, 3)
        As, Ag = cpasync.tma_partition(
            maps.a, walk.y, cute.make_layout(tile.cluster_n), sA, cute.group_modes(tA, 0, 3)
        )  # (TMA, stage), (TMA, m tiles, k tiles, l)
        parts = self.b_parts(shared.sB) * (tile.num_bs if tile.cta_group == 2 else 1)
        bs = [
            cpasync.tma_partition(
                atom, walk.x // tile.cta_group, pairs_m, cute.group_modes(sB, 0, 3), cute.group_modes(tB, 0, 3)
            )
            for atom, sB in zip(maps.b, parts, strict=True)
        ]  # of each: (TMA, stage), (TMA, n tiles, k tiles, l)
        keep_full(feeds(params, walk, (As, Ag), bs), shared.ab, self.facts, walk, shared.split)

    @cute.jit
    def multiply(self, mma: cute.TiledMma, tC: cute.Tensor, shared: Shared, walk: Walk) -> None:
        """The MMA warp of the leader CTA: one accumulator after the other. Needs no coordinates, only the count."""
        ab, acc = shared.ab, shared.acc
        fA = mma.make_fragment_A(shared.sA)  # (MMA, MMA_M, MMA_K, stage), descriptors
        fB = mma.make_fragment_B(shared.sB)  # (MMA, MMA_N, MMA_K, stage)
        if walk.x % self.facts.tile.cta_group == 0:
            read = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.facts.stages)
            write = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.tmem.stages)
            idx = walk.first
            while idx < walk.num_items:
                acc.producer_acquire(write)
                tC_tile = tC[None, None, None, write.index]
                mma.set(tcgen05.Field.ACCUMULATE, False)
                for _ in cutlass.range(walk.k_count, unroll=1):
                    ab.consumer_wait(read)
                    for kb in cutlass.range_constexpr(cute.size(fA, mode=[2])):
                        cute.gemm(mma, tC_tile, fA[None, None, kb, read.index], fB[None, None, kb, read.index], tC_tile)
                        mma.set(tcgen05.Field.ACCUMULATE, True)
                    ab.consumer_release(read)
                    read.advance()
                acc.producer_commit(write)
                write.advance()
                idx += walk.step
            acc.producer_tail(write)
