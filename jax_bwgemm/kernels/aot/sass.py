"""The instructions of compiled kernels, counted, and those that a variant's tile promises. Needs nvdisasm.

nvdisasm spends 0.31 s on starting and 0.02 s on a kernel (measured: 13.5.37, one CPU core), so the code of many
kernels goes through it as one raw binary. CuTeDSL's own `--keep-sass` would cost a start for each kernel.
"""

from __future__ import annotations

import collections
import importlib.metadata
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from jax_bwgemm.facts.arch import family_of
from jax_bwgemm.facts.families import FAMILIES
from jax_bwgemm.facts.problem import FP8_DTYPES, INT8_DTYPES
from jax_bwgemm.facts.repack import Repack
from jax_bwgemm.facts.resources import reads_a_from_registers, sharing_ctas
from jax_bwgemm.facts.variant import Variant

COUNTED = {of.name: of.opcodes.counted for of in FAMILIES}
COUNTED["repack"] = ("LDG.128", "STG.128", "STS", "LDS.128", "STL", "LDL")
_CODE_ALIGN_BYTES = 128
_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P[0-9T]+\s+)?([A-Z][A-Z0-9_.]*)")


def disassemble(codes: Sequence[bytes], target: str) -> list[list[str]]:
    """The opcodes, modifiers included, of each kernel's code (its `.text` section)."""
    image, starts = bytearray(), []
    for code in codes:
        starts.append(len(image))
        image += code + bytes(-len(code) % _CODE_ALIGN_BYTES)
    opcodes: list[list[str]] = [[] for _ in codes]
    kernel_idx = 0
    for offset, opcode in _INSTRUCTION.findall(_run_nvdisasm(bytes(image), target)):
        while kernel_idx + 1 < len(starts) and int(offset, 16) >= starts[kernel_idx + 1]:
            kernel_idx += 1
        opcodes[kernel_idx].append(opcode)
    return opcodes


def kind_of(kernel: Variant | Repack) -> str:
    """The key of COUNTED."""
    return "repack" if isinstance(kernel, Repack) else family_of(kernel.target).name


def count(opcodes: Sequence[str], kind: str) -> dict[str, int]:
    """How often each of COUNTED[kind] occurs. "UTMALDG.2CTA" counts every UTMALDG with that modifier among its own."""
    parts = collections.Counter(frozenset((f"={o.split('.')[0]}", *o.split(".")[1:])) for o in opcodes)
    counts = {}
    for name in COUNTED[kind]:
        base, *modifiers = name.split(".")
        counts[name] = sum(num for part, num in parts.items() if part >= {f"={base}", *modifiers})
    return counts


def why_broken(counts: dict[str, int], kernel: Variant | Repack) -> str | None:
    """None if the instructions are those that the kernel promises, else one sentence."""
    for name in promised(kernel):
        if not counts[name]:
            return f"{kernel.name} requires {name} instructions, got none"
    if isinstance(kernel, Variant) and (reason := _why_not_paired(counts, kernel) or _why_serial(counts, kernel)):
        return reason
    for name in ("STL", "LDL"):
        if counts[name]:
            return f"a kernel requires no local memory (no spills), got {counts[name]} {name} instructions"
    return None


def _why_not_paired(counts: dict[str, int], variant: Variant) -> str | None:
    if variant.tile.cta_group == 2:
        loads = () if variant.moves.matrices else ("UTMALDG",)  # each CTA of a pair loads a residual for itself
        for name in (mma_opcode(variant), "UTCBAR", *loads):
            if counts[name] != counts[f"{name}.2CTA"]:
                return f"cta_group 2 requires every {name} to be .2CTA, got {counts[f'{name}.2CTA']} of {counts[name]}"
    return None


def _why_serial(counts: dict[str, int], variant: Variant) -> str | None:
    """ptxas waits for every single wgmma where it cannot prove that nobody touches its registers meanwhile."""
    opcode, wait = mma_opcode(variant), family_of(variant.target).opcodes.wait
    if wait and counts[wait] >= counts[opcode]:
        return f"wgmmas in flight require fewer {wait} than {opcode}, got {counts[wait]} and {counts[opcode]}"
    return None


def mma_opcode(variant: Variant) -> str:
    """The tensor core instruction of its operands: floats of 2 or 4 bytes, of 1 byte, or integers; or of fragments in
    registers."""
    opcodes = family_of(variant.target).opcodes
    if variant.tile.is_thin:
        return opcodes.fragments
    if variant.a_dtype in INT8_DTYPES:
        return opcodes.integer
    return opcodes.quarter if variant.a_dtype in FP8_DTYPES else opcodes.half


def promised(kernel: Variant | Repack) -> list[str]:
    """Instructions that it must have."""
    if isinstance(kernel, Repack):
        return ["LDG.128", "STG.128", *(["STS", "LDS.128"] if kernel.kind == "transpose" else [])]
    tile = kernel.tile
    if tile.direct:
        return [mma_opcode(kernel), "LDGSTS.128", "STG", *(["LDS.128"] if tile.is_thin else [])]
    by_threads = "STG.128" if kernel.c_major == "n" else "STG"
    names = [mma_opcode(kernel), "UTMALDG", "UTMASTG" if kernel.store == "tma" else by_threads]
    names += family_of(kernel.target).opcodes.demanded
    if reads_a_from_registers(kernel.a_dtype, kernel.a_major, kernel.target):
        names.append("LDS" if kernel.a_dtype == "float32" else "LDSM")
    if sharing_ctas(tile, "a") > 1 or sharing_ctas(tile, "b") > 1:
        names.append("UTMALDG.MULTICAST")
    return names


def _run_nvdisasm(image: bytes, target: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".bin") as file:
        file.write(image)
        file.flush()
        sm = f"SM{target.removeprefix('sm_')}"
        command = [find_nvdisasm(), "--binary", sm, "--no-dataflow", file.name]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"nvdisasm requires code of {target}, got: {done.stderr.strip() or done.returncode}")
    return done.stdout


def find_nvdisasm() -> str:
    """The one of the PyPI wheel, else the one on PATH."""
    try:
        files = importlib.metadata.files("nvidia-cuda-nvdisasm") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    found = [str(Path(str(file.locate()))) for file in files if file.name == "nvdisasm"]
    path = found[0] if found else shutil.which("nvdisasm")
    if path is None:
        raise FileNotFoundError("the build requires nvdisasm, got none; `pip install nvidia-cuda-nvdisasm`")
    return path
