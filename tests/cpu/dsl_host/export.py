"""Writes the host code that CuTeDSL generates for a variant as an object file, and beside it the recipe that the build
would write into the manifest: python export.py DIR VARIANT_JSON."""

from __future__ import annotations

import json
import pathlib
import sys

from jax_bwgemm.facts.recipe import Recipe
from jax_bwgemm.facts.variant import Variant, buffers
from jax_bwgemm.kernels.aot.compile import checked_maps, compile_host, params
from jax_bwgemm.kernels.aot.refusals import lay_out

if __name__ == "__main__":
    variant = Variant.from_json(json.loads(sys.argv[2]))
    gemm, compiled = compile_host(variant, f"--gpu-arch {variant.target} --dump-dir={sys.argv[1]}")
    compiled.export_to_c(sys.argv[1], "host", "host")
    recipe = Recipe(buffers(variant), checked_maps(variant, gemm.tma_boxes), lay_out(params(variant, gemm)))
    (pathlib.Path(sys.argv[1]) / "recipe.json").write_text(json.dumps(recipe.texts()))
