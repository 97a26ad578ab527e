"""`bench --layers`: feed-forward blocks, forward, with all gradients, and with those of weights added up over batches:
`mlp` and `gated_mlp` against the same written with `@`, under `jax_bwgemm.accelerate`, `jax_bwgemm.install()` and under
XLA with sets of flags, alternately."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_bwgemm
from jax_bwgemm.bench import candidates, machine, timing
from jax_bwgemm.bench.models import kernels
from jax_bwgemm.bench.peers import FLAG_SETS

Operands = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True)
class Layer:
    """`tokens` of `width`, with `ffn` hidden values; gated layers have no biases, others do."""

    tokens: int = 8192
    width: int = 4096
    ffn: int = 14336
    activation: str = "silu"
    is_gated: bool = True

    def __str__(self) -> str:
        kind = "gated" if self.is_gated else "biased"
        return f"{self.tokens} x {self.width} -> {self.ffn}, {kind} {self.activation}"

    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of x, the weights and the biases."""
        t, d, f = self.tokens, self.width, self.ffn
        return (t, d), (d, f), *([(d, f), (f, d)] if self.is_gated else [(f, d), (f,), (d,)])

    def fused(self, x: jax.Array, *ws: jax.Array) -> jax.Array:
        if self.is_gated:
            return jax_bwgemm.gated_mlp(x, *ws, activation=self.activation)
        w_in, w_out, bias_in, bias_out = ws
        return jax_bwgemm.mlp(x, w_in, w_out, bias_in=bias_in, bias_out=bias_out, activation=self.activation)

    def plain(self, x: jax.Array, *ws: jax.Array) -> jax.Array:
        active: Callable[[jax.Array], jax.Array] = getattr(jax.nn, self.activation)
        if self.is_gated:
            gate, up, down = ws
            return (active(x @ gate) * (x @ up)) @ down
        w_in, w_out, bias_in, bias_out = ws
        return active(x @ w_in + bias_in) @ w_out + bias_out


LAYERS = (
    Layer(),
    Layer(activation="gelu"),
    Layer(2048),
    Layer(512),
    Layer(ffn=16384, activation="gelu", is_gated=False),
    Layer(ffn=16384, activation="relu", is_gated=False),
    Layer(8192, 1024, 4096, activation="gelu", is_gated=False),
)


def forward(f: Callable[..., jax.Array], *operands: jax.Array) -> Any:
    return f(*operands[:-1])


def gradients(f: Callable[..., jax.Array], *operands: jax.Array) -> Any:
    """The result and the cotangents of all operands, of the last operand as the result's."""
    out, pullback = jax.vjp(f, *operands[:-1])
    return out, pullback(operands[-1])


def sums(f: Callable[..., jax.Array], *operands: jax.Array) -> Any:
    """The gradients of all weights, added up in float32 over TURNS parts of the tokens, one after the other."""
    x, *ws, cotangent = operands
    parts = tuple(z.reshape(TURNS, -1, z.shape[-1]) for z in (x, cotangent))

    def turn(sums: Operands, part: Operands) -> tuple[Operands, None]:
        _, pullback = jax.vjp(functools.partial(f, part[0]), *ws)
        return jax.tree.map(lambda sum, g: sum + g.astype(sum.dtype), sums, pullback(part[1])), None

    return jax.lax.scan(turn, tuple(jnp.zeros(w.shape, jnp.float32) for w in ws), parts)[0]


STEPS = {"forward": forward, "gradients": gradients, "sums": sums}
TURNS = 4


def main(rounds: int, path: Path | None, commit: str, layers: Sequence[Layer] = LAYERS) -> int:
    arch = candidates.gpu_arch("`bench --layers`")
    path = machine.result_path(path, "layers", arch.name)
    method, clock = timing.choose_clock()
    content: dict[str, Any] = {
        "benchmark": "layers",
        "machine": machine.describe(commit),
        "method": method,
        "rounds": rounds,
        "rows": [],
    }
    print(f"{method}; ratios are of the time to ours")
    for layer in layers:
        operands = make_operands(layer)
        for step in STEPS:
            row = {"layer": dataclasses.asdict(layer), "step": step} | measure(layer, step, operands, clock, rounds)
            content["rows"].append(row)
            times = row["times_us"]
            ratios = "  ".join(f"{name} {us / times['ours']:.3f}" for name, us in times.items() if name != "ours")
            print(f"{layer!s:48} {step:9} ours {times['ours']:8.1f} us  {ratios}", flush=True)
            path.write_text(json.dumps(content, indent=1) + "\n")
    print(f"wrote {path}")
    return 0


def make_operands(layer: Layer) -> Operands:
    """And a cotangent of the result, which has x's shape."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        scale = shape[0] ** -0.5 if len(shape) == 2 and shape[0] != layer.tokens else 1.0
        return jnp.asarray(rng.standard_normal(shape, np.float32) * scale, jnp.bfloat16)

    return tuple(normal(*shape) for shape in (*layer.shapes(), layer.shapes()[0]))


def measure(layer: Layer, step: str, operands: Operands, clock: Any, rounds: int) -> dict[str, Any]:
    def compiled(f: Callable[..., Any], flags: str = "default") -> Any:
        return jax.jit(f, compiler_options=dict(FLAG_SETS[flags])).lower(*operands).compile()

    fused, plain = (functools.partial(STEPS[step], f) for f in (layer.fused, layer.plain))
    programs = {"ours": compiled(jax_bwgemm.accelerate(fused) if step == "sums" else fused)}
    accelerated = functools.partial(STEPS[step], jax_bwgemm.accelerate(layer.plain))
    programs["accelerated"] = compiled(jax_bwgemm.accelerate(accelerated) if step == "sums" else accelerated)
    with jax_bwgemm.installed():
        programs["installed"] = compiled(plain)
    programs |= {name: compiled(plain, name) for name in FLAG_SETS}
    measures = {name: clock(program, 1, *operands) for name, program in programs.items()}
    samples = timing.alternate(measures, rounds, 0.0)
    times = {name: sample.median_us for name, sample in samples.items()}
    return {"times_us": times, "kernels": kernels(programs["ours"])}
