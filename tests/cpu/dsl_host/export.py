"""Writes the host code that CuTeDSL generates for a variant as an object file: python export.py DIR VARIANT_JSON."""

from __future__ import annotations

import json
import sys

from jax_bwgemm.kernels.compile import compile_host
from jax_bwgemm.tile import Tile
from jax_bwgemm.variant import Variant

if __name__ == "__main__":
    fields = json.loads(sys.argv[2])
    variant = Variant(**{**fields, "tile": Tile(**fields["tile"])})
    compile_host(variant, f"--gpu-arch {variant.target} --dump-dir={sys.argv[1]}")[1].export_to_c(
        sys.argv[1], "host", "host"
    )
