"""A functional PTX emulator for CuTeDSL's Hopper and Blackwell kernels, with hostile timing and race detection.

module = parse(ptx)
memory = Memory()
launch = Launch(grid=(1, 1, 1), block=(32, 1, 1), params=(memory.register(array, "x"),))
counters = run(module, launch, memory, schedule=Schedule(seed=1))

What is assumed, since the PTX ISA or the machines at hand do not settle it:

- `tcgen05.fence::before_thread_sync` and `::after_thread_sync` do nothing: an mbarrier's wait alone orders MMAs, TMEM
  loads and stores. A kernel that lacks these fences is not refused.
- Integer MMAs that saturate do so once an MMA (wgmma: once a commit group), not once a product; without it they wrap.
- A cluster of any legal shape is resident as a whole: whether a GPU has room for one of 4x4 CTAs with this much shared
  memory is the driver's to say.
- The lowest lane is elected; equal copies by TMA that a whole warp issues count once; `setmaxnreg` takes from a pool
  that one CTA has to itself; commits of a thread arrive in order.
- Clusters run one after the other, so one that waits for a later one deadlocks here (`global_order` demands an order
  between them all the same). What TMA moves through global memory has no order there.
- A wgmma that takes A from registers takes what all lanes of its warp loaded into them: a lane that waits for it may
  give their shared memory back. A lane that hands something on hands on none of what its warp did in shared memory
  since all lanes met, its own accesses neither, if others did anything there.
- A register is undefined as a whole: lanes that an instruction under a mask left out pass for written.
- Caches, bank conflicts, timing, register limits and what ptxas makes of the PTX are outside;
  `tests/emu/machine_code.py` looks at some of the last.
"""

from jax_bwgemm.emulator.buffers import Memory
from jax_bwgemm.emulator.engine import Schedule
from jax_bwgemm.emulator.errors import EmulatorError, Fault, LaunchError, PtxSyntaxError, UnsupportedInstruction, Where
from jax_bwgemm.emulator.launch import Counters, Launch, run
from jax_bwgemm.emulator.observe import Observer, Trace
from jax_bwgemm.emulator.parser import parse
from jax_bwgemm.emulator.tensormap import TensorMap
from jax_bwgemm.emulator.timeline import Timeline

__all__ = [
    "Counters",
    "EmulatorError",
    "Fault",
    "Launch",
    "LaunchError",
    "Memory",
    "Observer",
    "PtxSyntaxError",
    "Schedule",
    "TensorMap",
    "Timeline",
    "Trace",
    "UnsupportedInstruction",
    "Where",
    "parse",
    "run",
]
