"""`bench --decode`: a step of decoding through many layers, as a list and as a scan, by host time: launches count. Ours
under `jax_bwgemm.install()`, alone and of an accelerated step, and XLA, alternately, under options of XLA's command
buffers.

A layer has the products of a gated transformer block and what stands between them, but no attention, which has a cache
of its own; a step is memory-bound, and its products are short enough for launches to show.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import jax_bwgemm
from jax_bwgemm.bench import candidates, machine, timing
from jax_bwgemm.bench.models import Weights, gated, norm
from jax_bwgemm.runtime import ffi

CAPTURED = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,CONDITIONAL,DYNAMIC_SLICE_FUSION"
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "graphs of any size": {"xla_gpu_graph_min_graph_size": 1},
    "loops in graphs": {"xla_gpu_enable_command_buffer": f"{CAPTURED},WHILE"},
    "no graphs": {"xla_gpu_enable_command_buffer": ""},
}  # compiler options of XLA
CALLS = 6  # until command buffers are there, and what is counted stays the same


@dataclasses.dataclass(frozen=True)
class Model:
    """`layers` of a gated block with grouped keys and values, for `batch` tokens, one of each sequence."""

    layers: int = 32
    width: int = 4096
    grouped: int = 1024
    ffn: int = 14336
    batch: int = 16

    def shapes(self) -> dict[str, tuple[int, int]]:
        d, f = self.width, self.ffn
        return {"qkv": (d, d + 2 * self.grouped), "o": (d, d), "gate": (d, f), "up": (d, f), "down": (f, d)}

    def __str__(self) -> str:
        return f"{self.layers} layers, d {self.width}, ffn {self.ffn} gated, batch {self.batch}"


def layer(model: Model, x: jax.Array, w: Weights) -> jax.Array:
    x = x + (norm(x) @ w["qkv"])[:, : model.width] @ w["o"]
    return x + gated(norm(x), w)


def as_list(model: Model, x: jax.Array, weights: list[Weights]) -> jax.Array:
    for w in weights:
        x = layer(model, x, w)
    return x


def as_scan(model: Model, x: jax.Array, weights: Weights) -> jax.Array:
    return jax.lax.scan(lambda x, w: (layer(model, x, w), None), x, weights)[0]


FORMS: Mapping[str, Callable[..., jax.Array]] = {"list": as_list, "scan": as_scan}


def main(rounds: int, path: Path | None, commit: str, model: Model | None = None) -> int:
    arch = candidates.gpu_arch("`bench --decode`")
    model = model or Model()
    path = machine.result_path(path, "decode", arch.name)
    content: dict[str, Any] = {
        "benchmark": "decode",
        "machine": machine.describe(commit),
        "model": dataclasses.asdict(model),
    }
    content |= {"rounds": rounds, "rows": []}
    print(f"{model}: host time of {timing.HOST_BATCH} steps, launches included")
    for form in FORMS:
        operands = make_operands(model, form)
        for option, compiler_options in OPTIONS.items():
            row = {"form": form, "options": option} | measure(model, form, compiler_options, operands, rounds)
            content["rows"].append(row)
            print(
                f"{form:5} {option:20} ours {row['ours_us']:8.1f} us, accelerated {row['accelerated_us']:8.1f} us  "
                f"XLA {row['xla_us']:8.1f} us  {row['xla_us'] / row['ours_us']:.3f}  "
                f"our handler ran {row['executes']} times a step",
                flush=True,
            )
            path.write_text(json.dumps(content, indent=1) + "\n")
    print(f"wrote {path}")
    return 0


def measure(
    model: Model, form: str, options: Mapping[str, Any], operands: tuple[jax.Array, Any], rounds: int
) -> dict[str, Any]:
    def step(x: jax.Array, weights: Any) -> jax.Array:
        return FORMS[form](model, x, weights)

    def compiled(step: Callable[..., jax.Array]) -> Any:
        return jax.jit(step, compiler_options=dict(options)).lower(*operands).compile()

    with jax_bwgemm.installed():
        ours, accelerated = compiled(step), compiled(jax_bwgemm.accelerate(step))
    programs = {"ours": ours, "accelerated": accelerated, "xla": compiled(step)}
    executes = 0
    for _ in range(CALLS):
        before = ffi.execute_count()
        jax.block_until_ready(ours(*operands))
        executes = ffi.execute_count() - before
    measures = {name: timing.host_clock(program, 1, *operands) for name, program in programs.items()}
    samples = timing.alternate(measures, rounds, 0.0)
    *own, theirs = (program(*operands).astype(jnp.float32) for program in programs.values())
    times = {f"{name}_us": sample.median_us for name, sample in samples.items()}
    return times | {"executes": executes, "difference": max(float(jnp.abs(out - theirs).max()) for out in own)}


def make_operands(model: Model, form: str) -> tuple[jax.Array, Any]:
    def normal(key: jax.Array, *shape: int) -> jax.Array:
        scaled: jax.Array = jax.random.normal(key, shape, jnp.bfloat16) * shape[-2] ** -0.5
        return scaled

    keys = dict(zip(model.shapes(), jax.random.split(jax.random.key(0), len(model.shapes())), strict=True))
    stacked = {name: normal(keys[name], model.layers, *shape) for name, shape in model.shapes().items()}
    x = jax.random.normal(jax.random.key(1), (model.batch, model.width), jnp.bfloat16)
    if form == "scan":
        return x, stacked
    return x, [{name: w[i] for name, w in stacked.items()} for i in range(model.layers)]
