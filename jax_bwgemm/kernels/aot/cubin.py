"""Reads from a cubin what the driver would find there: registers, stack, threads, parameters, code. Knows no variant.

A cubin is an ELF file. Attributes are records in `.nv.info` (a function's, by symbol) and `.nv.info.<entry>`; their
layout and codes were read off `cuobjdump -elf` of CUDA 13.5, which agreed on registers and stack of 164 kernels of all
three targets and on the parameters of 21.
"""

from __future__ import annotations

import dataclasses
import re
import struct
from collections.abc import Iterator

_BYTE_PAYLOADS = (1, 2, 3)  # EIFMT_NVAL, BVAL, HVAL: two bytes of value and no more; 4 (SVAL) is a size and a payload
_PTXAS = re.compile(rb"Cuda compilation tools, release [\d.]+, V([\d.]+)")  # .note.nv.tkinfo; sm_90a has none
_EIATTR_REQNTID = 0x10
_EIATTR_FRAME_SIZE = 0x11
_EIATTR_KPARAM_INFO = 0x17
_EIATTR_REGCOUNT = 0x2F


@dataclasses.dataclass(frozen=True)
class Facts:
    """What one cubin with one kernel says of itself. `params` are (offset, size) in kernel order."""

    entry: str
    registers: int
    stack_bytes: int
    num_threads: int
    params: tuple[tuple[int, int], ...]
    text: bytes
    ptxas: str


def read_cubin(cubin: bytes) -> Facts:
    """Facts of the only kernel in `cubin`; ValueError if it is no cubin or holds several kernels."""
    if cubin[:5] != b"\x7fELF\x02":
        raise ValueError(f"a cubin requires a 64-bit ELF file, got bytes starting {cubin[:5]!r}")
    try:
        return _read(cubin)
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise ValueError(f"a cubin requires whole sections, got a truncated file of {len(cubin)} bytes") from error


def _read(cubin: bytes) -> Facts:
    sections = _sections(cubin)
    entries = [name.removeprefix(".nv.info.") for name in sections if name.startswith(".nv.info.")]
    if len(entries) != 1:
        raise ValueError(f"a cubin requires exactly one kernel, got {len(entries)}: {entries}")
    entry = entries[0]
    shared = list(_attributes(sections[".nv.info"]))
    own = list(_attributes(sections[f".nv.info.{entry}"]))
    function = _symbols(sections).index(entry)
    registers = [count for symbol, count in _pairs(shared, _EIATTR_REGCOUNT) if symbol == function]
    return Facts(
        entry=entry,
        registers=max(registers),
        stack_bytes=max(size for _, size in _pairs(shared, _EIATTR_FRAME_SIZE)),
        num_threads=_threads(own),
        params=_params(own),
        text=sections[f".text.{entry}"],
        ptxas=version[1].decode() if (version := _PTXAS.search(cubin)) else "",
    )


def _sections(cubin: bytes) -> dict[str, bytes]:
    (table,) = struct.unpack_from("<Q", cubin, 40)
    entry_size, num, names_idx = struct.unpack_from("<HHH", cubin, 58)
    # (name, type, flags, address, offset, size, link, info, alignment, entry size)
    headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, table + i * entry_size) for i in range(num)]
    names = cubin[headers[names_idx][4] :]
    nobits = 8
    return {_string(names, h[0]): b"" if h[1] == nobits else cubin[h[4] : h[4] + h[5]] for h in headers}


def _string(table: bytes, offset: int) -> str:
    return table[offset : table.index(b"\0", offset)].decode()


def _symbols(sections: dict[str, bytes]) -> list[str]:
    table = sections[".symtab"]
    return [_string(sections[".strtab"], name) for (name,) in struct.iter_unpack("<I20x", table)]


def _attributes(section: bytes) -> Iterator[tuple[int, bytes]]:
    offset = 0
    while offset < len(section):
        kind, code, size = struct.unpack_from("<BBH", section, offset)
        offset += 4
        if kind in _BYTE_PAYLOADS:
            yield code, size.to_bytes(2, "little")
        else:
            yield code, section[offset : offset + size]
            offset += size


def _pairs(attributes: list[tuple[int, bytes]], wanted: int) -> list[tuple[int, int]]:
    return [struct.unpack("<II", payload) for code, payload in attributes if code == wanted]


def _threads(attributes: list[tuple[int, bytes]]) -> int:
    for code, payload in attributes:
        if code == _EIATTR_REQNTID:
            x, y, z = struct.unpack("<III", payload)
            return x * y * z
    return 0


def _params(attributes: list[tuple[int, bytes]]) -> tuple[tuple[int, int], ...]:
    found = {}
    for code, payload in attributes:
        if code == _EIATTR_KPARAM_INFO:
            _, ordinal, offset, packed = struct.unpack("<IHHI", payload)
            found[ordinal] = (offset, packed >> 18)
    return tuple(found[ordinal] for ordinal in sorted(found))
