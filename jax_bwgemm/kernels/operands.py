"""What both kernel families say about their operands: types, layouts, example tensors."""

from __future__ import annotations

import re
from typing import Any

import cutlass
from cutlass import cute
from cutlass.tensor_utils import LayoutEnum

_COMMON = {
    "bfloat16": cutlass.BFloat16,
    "float16": cutlass.Float16,
    "float8_e4m3fn": cutlass.Float8E4M3FN,
    "float8_e5m2": cutlass.Float8E5M2,
}
IN_DTYPES = _COMMON | {"float32": cutlass.TFloat32, "int8": cutlass.Int8, "uint8": cutlass.Uint8}
OUT_DTYPES = _COMMON | {"float32": cutlass.Float32, "int32": cutlass.Int32}
ACC_DTYPES = {"float32": cutlass.Float32, "int32": cutlass.Int32}


def layout_enum(major: str) -> LayoutEnum:
    """Of an (m or n, k) operand: row-major if its rows are contiguous in k."""
    return LayoutEnum.ROW_MAJOR if major == "k" else LayoutEnum.COL_MAJOR


def coordinate_tensor(second_is_contiguous: bool, first: Any, second: Any, batch: Any) -> cute.Tensor:
    """(first, second, batch) coordinates as a TMA descriptor counts them: dimension 0 is the contiguous one."""
    strides = (cute.E(1), cute.E(0), cute.E(2)) if second_is_contiguous else (cute.E(0), cute.E(1), cute.E(2))
    return cute.make_tensor((0, 0, 0), cute.make_layout((first, second, batch), stride=strides))


def example_tensor(dtype: Any, second_is_contiguous: bool, is_aligned: bool = True) -> Any:
    """A stand-in of dynamic shape (first, second, batch), from which a TMA atom's type is made."""
    divisibility, align_bytes = (16, 16) if is_aligned else (1, dtype.width // 8)
    shape = tuple(cute.SymInt(width=32, divisibility=divisibility) for _ in range(3))
    order = (1, 0, 2) if second_is_contiguous else (0, 1, 2)
    return cute.runtime.make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=align_bytes)


def dsl_box(atom: cute.CopyAtom) -> tuple[int, ...]:
    """The box that CuTeDSL chose for a TMA atom, before multicast splits it; only the type's text holds it."""
    match = re.search(r'tma_gbasis = <"\(([\d,]+)\):', str(atom._trait.value.type))
    if match is None:
        raise ValueError(f"a TMA atom requires a tma_gbasis in its type, got {atom._trait.value.type}")
    return tuple(int(extent) for extent in match[1].split(","))
