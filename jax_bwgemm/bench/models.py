"""A training step of a transformer block under `jax_bwgemm.install()`, against XLA under sets of flags, alternately.

The block is written as anybody writes it, with `@`, and einsum or cuDNN's attention, and is the same for all: nothing
of it names this package. "fused" is the same block with `jax_bwgemm.gated_mlp` and `jax_bwgemm.matmul(residual=)` in
the place of what they fuse, and `jax_bwgemm.accelerate` around the step, by which the kernels of the weights' gradients
make the new weights. "accelerated" is the block as anybody writes it, with `accelerate` around its loss, which finds
what to fuse, and around the step. With several GPUs the batch is divided over them, and the gradients of the weights
are added. With one, CUPTI says what of each step its products take: no other library of products can spare the rest.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_bwgemm
from jax_bwgemm.bench import candidates, machine, timing
from jax_bwgemm.bench.peers import FLAG_SETS

Weights = dict[str, jax.Array]
OF_PRODUCTS = re.compile("sm_[0-9]+[a-f]_|nvjet|gemm|cutlass|splitK")  # of kernels' symbols: ours, cuBLAS's, Triton's
SPLIT_ROUNDS = 5
PASSES = 3  # of each weight: forward, and the gradients of its operand and of itself


@dataclasses.dataclass(frozen=True)
class Block:
    """Sizes of a gated block; `batch` sequences of `length` tokens."""

    width: int = 4096
    ffn: int = 14336
    heads: int = 32
    batch: int = 4
    length: int = 2048
    attention: str = "cudnn"

    def shapes(self) -> dict[str, tuple[int, ...]]:
        d, f = self.width, self.ffn
        return {"q": (d, d), "k": (d, d), "v": (d, d), "o": (d, d), "gate": (d, f), "up": (d, f), "down": (f, d)}

    @property
    def flops(self) -> float:
        """Of a step's products with weights."""
        return 2.0 * PASSES * self.batch * self.length * sum(math.prod(shape) for shape in self.shapes().values())

    def __str__(self) -> str:
        tokens = f"{self.batch} x {self.length} tokens"
        return f"d {self.width}, ffn {self.ffn} gated, {self.heads} heads, {tokens}, attention by {self.attention}"


BLOCKS = (Block(), Block(attention="einsum"))


def forward(block: Block, w: Weights, x: jax.Array, is_fused: bool = False) -> jax.Array:
    """(batch, length, width): attention, then the gated MLP, both behind a norm and added to their input."""
    h = norm(x)
    q, k, v = (_heads(block, h @ w[name]) for name in "qkv")
    attended = _attended(block, q, k, v).reshape(x.shape)
    if is_fused:
        x = jax_bwgemm.matmul(attended, w["o"], residual=x)
        return jax_bwgemm.gated_mlp(norm(x), w["gate"], w["up"], w["down"], residual=x)
    x = x + attended @ w["o"]
    return x + gated(norm(x), w)


def gated(x: jax.Array, w: Weights) -> jax.Array:
    return (jax.nn.silu(x @ w["gate"]) * (x @ w["up"])) @ w["down"]


def step(
    block: Block, w: Weights, x: jax.Array, is_fused: bool = False, is_accelerated: bool = False
) -> tuple[jax.Array, Weights]:
    """The loss, and weights after a step of gradient descent."""

    def loss(w: Weights) -> jax.Array:
        return jnp.mean(forward(block, w, x, is_fused).astype(jnp.float32) ** 2)

    value, gradients = jax.value_and_grad(jax_bwgemm.accelerate(loss) if is_accelerated else loss)(w)
    return value, jax.tree.map(lambda w, g: w - (1e-3 * g).astype(w.dtype), w, gradients)


def main(rounds: int, path: Path | None, commit: str, blocks: Sequence[Block] = BLOCKS) -> int:
    arch = candidates.gpu_arch("`bench --models`")
    num = jax.device_count()
    path = machine.result_path(path, "models", f"{arch.name}x{num}")
    content: dict[str, Any] = {
        "benchmark": "models",
        "machine": machine.describe(commit),
        "gpus": num,
        "rounds": rounds,
        "rows": [],
    }
    method, clock = timing.choose_clock() if num == 1 else ("wall clock", timing.host_clock)
    for block in blocks:
        limit_us = block.flops / (num * arch.peak_tflops * 1e6)
        row = {"limit_us": limit_us} | measure(block, clock, rounds)
        content["rows"].append({"block": dataclasses.asdict(block), "method": method} | row)
        print(f"{block}, {num} GPU{'s' * (num > 1)}: {method}; products at the peak rate {limit_us:.1f} us")
        for name, us in row["times_us"].items():
            ratio, products_us = us / row["times_us"]["ours"], row["products_us"].get(name)
            said = f"  products {products_us:.1f} us" if products_us else ""
            print(f"{name:18} {us:10.1f} us  {ratio:.3f} of ours  loss {row['losses'][name]:.6f}{said}", flush=True)
        path.write_text(json.dumps(content, indent=1) + "\n")
    print(f"wrote {path}")
    return 0


def measure(block: Block, clock: Any, rounds: int) -> dict[str, Any]:
    operands = make_operands(block)
    programs = compile_all(block, operands)
    losses = {name: float(program(*operands)[0]) for name, program in programs.items()}
    measures = {name: clock(program, 1, *operands) for name, program in programs.items()}
    samples = timing.alternate(measures, rounds, 0.0)
    times = {name: sample.median_us for name, sample in samples.items()}
    split = clock is not timing.host_clock and jax.device_count() == 1
    products = {name: products_us(program, *operands) for name, program in programs.items()} if split else {}
    return {"times_us": times, "products_us": products, "losses": losses, "kernels": kernels(programs["ours"])}


def products_us(program: Any, *operands: Any) -> float:
    """Of the kernels of one call that multiply, by CUPTI; not of the attention's, where cuDNN has it."""
    found = timing.kernel_times(program, SPLIT_ROUNDS, *operands, rests=True)
    return sum(us for symbol, us in found if OF_PRODUCTS.search(symbol)) / SPLIT_ROUNDS


def make_operands(block: Block) -> tuple[Weights, jax.Array]:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape, np.float32) * shape[0] ** -0.5, jnp.bfloat16)

    w, x = (
        {name: normal(*shape) for name, shape in block.shapes().items()},
        normal(block.batch, block.length, block.width),
    )
    if jax.device_count() > 1:
        mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
        w, x = jax.device_put(w, NamedSharding(mesh, P())), jax.device_put(x, NamedSharding(mesh, P("data")))
    return w, x


def compile_all(block: Block, operands: tuple[Weights, jax.Array]) -> dict[str, Any]:
    """XLA under each set of flags, and ours under its default and where Triton has no product: what we leave to XLA
    (attention's products, if they are written out) depends on the flags."""

    def compiled(name: str, is_fused: bool = False, is_accelerated: bool = False) -> Any:
        def own(w: Weights, x: jax.Array) -> tuple[jax.Array, Weights]:
            return step(block, w, x, is_fused, is_accelerated)

        program = jax_bwgemm.accelerate(own) if is_fused or is_accelerated else own
        return jax.jit(program, compiler_options=dict(FLAG_SETS[name])).lower(*operands).compile()

    with jax_bwgemm.installed():
        ours = {"ours": compiled("default"), "ours, no-triton": compiled("no-triton")}
        ours["ours, fused"] = compiled("default", is_fused=True)
        ours["ours, accelerated"] = compiled("default", is_accelerated=True)
    return ours | {name: compiled(name) for name in FLAG_SETS}


def kernels(program: Any) -> dict[str, int]:
    """How often each of our kernels, and each of XLA's library calls, is in a program."""
    names = _variants(program.as_text() or "")
    return {name: names.count(name) for name in sorted(set(names))}


def _variants(text: str) -> list[str]:
    found = []
    for line in text.splitlines():
        if "custom_call_target=" in line:
            target = line.partition('custom_call_target="')[2].partition('"')[0]
            variant = line.partition('variant = "')[2].partition('"')[0]
            found.append(variant or target)
    return found


def norm(x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-6)).astype(x.dtype)


def _attended(block: Block, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    if block.attention == "cudnn":
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(mask, scores.astype(jnp.float32), -jnp.inf)).astype(q.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def _heads(block: Block, x: jax.Array) -> jax.Array:
    return x.reshape(*x.shape[:2], block.heads, -1)
