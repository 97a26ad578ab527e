"""Trains an MLP (linen) and a small transformer (nnx) on handwritten digits, in plain Flax and with our layers.

Both start from the same parameters, since checkpoints load both ways, and see the same images in the same order.
Parameters are float32, products bfloat16. The MLP is written with `jax_bwgemm.flax.linen`; the transformer is plain
nnx, of which `jax_bwgemm.flax.replace` swaps the layers. The losses become a picture. A table comes last: how well each
learnt, how fast, and how many of our products kernels computed, which need a Hopper or Blackwell GPU or the emulator.

    pip install 'jax_bwgemm[examples]'
    python examples/digits.py
    python examples/digits.py --emulate sm_100f --steps 2
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

try:
    import optax
    from digits_models import Model, mlps, transformers
    from matplotlib.figure import Figure
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table
    from sklearn.datasets import load_digits
except ModuleNotFoundError as error:
    raise SystemExit(
        f"this example requires {error.name}, which is not installed: pip install 'jax_bwgemm[examples]'"
    ) from None

import jax_bwgemm

NUM_TEST = 297
Data = tuple[np.ndarray, np.ndarray]  # images (n, 8, 8) from 0 to 1, and which digits they are


@dataclasses.dataclass(frozen=True)
class Run:
    """What became of one training."""

    losses: list[float]
    accuracy: float
    step_ms: float  # the median of all steps but the first, which compiles
    params: Any
    products: jax_bwgemm.Stats


def digits(seed: int) -> tuple[Data, Data]:
    """Those to learn from and those to be tested on."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(labels))
    images, labels = (images[order] / 16).reshape(-1, 8, 8).astype(np.float32), labels[order].astype(np.int32)
    return (images[NUM_TEST:], labels[NUM_TEST:]), (images[:NUM_TEST], labels[:NUM_TEST])


def batches(num: int, batch: int, steps: int, seed: int) -> np.ndarray:
    """Which of `num` images each step sees: every image once an epoch, in a new order; the last few of it are left."""
    rng, per_epoch = np.random.default_rng(seed), num // batch
    epochs = [rng.permutation(num)[: per_epoch * batch] for _ in range(-(-steps // per_epoch))]
    return np.concatenate(epochs).reshape(-1, batch)[:steps]


def accuracy(model: Model, params: Any, data: Data) -> float:
    images, labels = data
    return float((jax.jit(model.apply)(params, images).argmax(-1) == labels).mean())


def train(model: Model, data: tuple[Data, Data], order: np.ndarray, advance: Callable[[], None]) -> Run:
    """`order`: the images of each step; `advance` is called after each."""
    (images, labels), test = data
    optimiser = optax.adamw(optax.warmup_cosine_decay_schedule(3e-4, 3e-3, len(order) // 10, len(order)))

    def loss_of(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        logits = model.apply(params, images).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    @functools.partial(jax.jit, donate_argnums=1)
    def step(params: Any, state: Any, images: jax.Array, labels: jax.Array) -> tuple[Any, Any, jax.Array]:
        loss, grads = jax.value_and_grad(loss_of)(params, images, labels)
        updates, state = optimiser.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    jax_bwgemm.stats(reset=True)
    params, state, losses, times = model.params, optimiser.init(model.params), [], []
    for chosen in order:
        start = time.perf_counter()
        params, state, loss = step(params, state, images[chosen], labels[chosen])
        losses.append(float(loss))
        times.append(1e3 * (time.perf_counter() - start))
        advance()
    products = jax_bwgemm.stats()
    return Run(losses, accuracy(model, params, test), statistics.median(times[1:] or times), params, products)


def draw(runs: dict[str, dict[str, Run]], path: Path) -> None:
    figure = Figure(figsize=(5 * len(runs), 3.5), layout="constrained")
    for i, (name, own) in enumerate(runs.items()):
        axes = figure.add_subplot(1, len(runs), i + 1, title=name, xlabel="step", ylabel="loss", yscale="log")
        for (who, run), style in zip(own.items(), ("-", "--"), strict=True):
            axes.plot(run.losses, style, label=who)
        axes.legend()
    figure.savefig(path, dpi=150)


def table(runs: dict[str, dict[str, Run]]) -> Table:
    found = Table("model", "layers", "loss", "accuracy", "ms a step", "kernels")
    for name, own in runs.items():
        for who, run in own.items():
            num, others = (sum(x.values()) for x in (run.products.kernels, run.products.fallbacks))
            products = f"{num} of {num + others}" if num + others else "-"
            found.add_row(name, who, f"{run.losses[-1]:.4f}", f"{run.accuracy:.3f}", f"{run.step_ms:.2f}", products)
    return found


def report(console: Console, runs: dict[str, dict[str, Run]]) -> None:
    """Which kernels ran, why XLA has the other products, and last the table."""
    for name, own in runs.items():
        products, reasons = own["ours"].products, collections.Counter[str]()
        for kernel, num in sorted(products.kernels.items()):
            console.print(f"{name}: {num} x {kernel}", highlight=False, soft_wrap=True)
        for product, num in products.fallbacks.items():
            reasons[product.partition(": ")[2]] += num
        for reason, num in reasons.items():
            console.print(f"{name}: {num} by XLA: {reason}", highlight=False, markup=False, soft_wrap=True)
    console.print(table(runs))


def arguments(args: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200, help="of each training, 1 or more")
    parser.add_argument("--batch", type=int, help="images a step; default 128, emulated 16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--emulate", choices=["sm_90a", "sm_100f"], help="run a target's kernels on a CPU")
    parser.add_argument("--output", type=Path, default=Path("digits.png"), help="the picture of the losses")
    found = parser.parse_args(args)
    if found.batch is None:
        found.batch = 16 if found.emulate else 128
    num_train = 1797 - NUM_TEST
    if found.steps < 1 or found.seed < 0 or not 1 <= found.batch <= num_train:
        got = f"{found.steps}, {found.seed} and {found.batch}"
        parser.error(f"--steps requires 1 or more, --seed 0 or more, --batch 1 to {num_train}, got {got}")
    if found.output.suffix.lower() not in (".png", ".svg", ".pdf") or not found.output.parent.is_dir():
        parser.error(f"--output requires a .png, .svg or .pdf in a directory that exists, got {found.output}")
    if found.emulate and jax.default_backend() != "cpu":
        parser.error("--emulate requires a CPU, got a GPU, which runs its own kernels: set JAX_PLATFORMS=cpu")
    return found


def main(args: Sequence[str] | None = None) -> dict[str, dict[str, Run]]:
    how, console = arguments(args), Console()
    width, num_layers = (32, 1) if how.emulate else (64, 2)
    if jax.default_backend() == "cpu" and not how.emulate:
        console.print("No GPU here: XLA computes all products (--emulate sm_100f --steps 2: kernels do)")
    data = digits(how.seed)
    order = batches(len(data[0][0]), how.batch, how.steps, how.seed)
    models = {"MLP, linen": mlps(2 * width, how.seed), "transformer, nnx": transformers(width, num_layers, how.seed)}
    runs: dict[str, dict[str, Run]] = {name: {} for name in models}
    with jax_bwgemm.config(on_fallback="ignore", emulate=how.emulate or "off"), Progress(console=console) as progress:
        for name, pair in models.items():
            for who, model in zip(("plain Flax", "ours"), pair, strict=True):
                task = progress.add_task(f"{name}, {who}", total=how.steps)
                runs[name][who] = train(model, data, order, functools.partial(progress.advance, task))
    for name, (plain, _) in models.items():
        loaded = accuracy(plain, runs[name]["ours"].params, data[1])
        console.print(f"{name}: plain Flax loads what ours learnt, accuracy {loaded:.3f}", highlight=False)
    draw(runs, how.output)
    console.print(f"losses: {how.output}", highlight=False)
    report(console, runs)
    return runs


if __name__ == "__main__":
    main()
