"""A functional PTX emulator for CuTeDSL's Hopper and Blackwell kernels, with hostile timing and race detection.

module = parse(ptx)
memory = Memory()
launch = Launch(grid=(1, 1, 1), block=(32, 1, 1), params=(memory.register(array, "x"),))
counters = run(module, launch, memory, schedule=Schedule(seed=1))
"""

from jax_bwgemm.emulator.engine import Schedule
from jax_bwgemm.emulator.errors import EmulatorError, Fault, LaunchError, PtxSyntaxError, UnsupportedInstruction, Where
from jax_bwgemm.emulator.launch import Counters, Launch, run
from jax_bwgemm.emulator.memory import Memory
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
