"""Where the roles of a kernel set out: each prepares what it can before it waits for all the others."""

from __future__ import annotations

from cutlass import cute, pipeline


@cute.jit
def enter(cluster: tuple[int, int, int]) -> None:
    """A warp's first meeting with all of its `cluster` (m, n, k): their barriers are made, and what ran on the GPU
    before has ended. Once for each warp, before it touches a barrier, or global memory."""
    pipeline.pipeline_init_wait(cluster_shape_mn=cluster)
    cute.arch.griddepcontrol_wait()
