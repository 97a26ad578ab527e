"""Which dimensions a product pairs, sums and keeps: a letter for each, as in an einsum. Knows no size, chip or JAX."""

from __future__ import annotations

import dataclasses
import string
from collections.abc import Sequence

Axes = Sequence[int]
MOST_MODES = len(string.ascii_letters)  # each is a letter


@dataclasses.dataclass(frozen=True)
class Contraction:
    """The modes of each operand and of the result, slowest first: "bmk,bkn->bmn" is a batch of matrix products.

    A mode of both operands is summed, or a batch if the result has it; one of a single operand is free, and the result
    has it. The result's modes stand in any order. `extras`: those of the epilogue's operands, some of the result's.
    `num_bs`: of a gated product 2, which both have b's modes. `reduced`: those of the epilogue's reductions, some of
    the result's, in its order; over the others such a vector is reduced. `symmetric`: b is a, under other names of its
    free modes, and what the epilogue reads is its own transpose, too.
    """

    a: str
    b: str
    out: str
    extras: tuple[str, ...] = ()
    num_bs: int = 1
    symmetric: bool = False
    reduced: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        a, b, out = set(self.a), set(self.b), set(self.out)
        if any(len(set(x)) != len(x) for x in (self.a, self.b, self.out, *self.extras)):
            raise ValueError(f"a contraction requires each mode once in an operand, got {self}")
        if not (a ^ b) <= out <= (a | b) or not set().union(*self.extras) <= out:
            raise ValueError(f"a contraction requires a result of all free modes and no unknown ones, got {self}")
        if any(modes != "".join(mode for mode in self.out if mode in modes) for modes in self.reduced):
            raise ValueError(f"a contraction requires reductions to modes of its result, in its order, got {self}")

    def __str__(self) -> str:
        return f"{','.join(self.operands)}->{','.join((self.out, *self.reduced))}"

    @property
    def operands(self) -> tuple[str, ...]:
        return (*self.factors, *self.extras)

    @property
    def factors(self) -> tuple[str, ...]:
        """Of a and every b."""
        return (self.a, *[self.b] * self.num_bs)

    @property
    def summed(self) -> str:
        return "".join(mode for mode in self.a if mode not in self.out)

    @property
    def batch(self) -> str:
        return "".join(mode for mode in self.out if mode in self.a and mode in self.b)

    @property
    def free_a(self) -> str:
        return "".join(mode for mode in self.out if mode not in self.b)

    @property
    def free_b(self) -> str:
        return "".join(mode for mode in self.out if mode not in self.a)

    @property
    def reduced_axes(self) -> tuple[tuple[int, ...], ...]:
        """Of each reduction, the result's dimensions that it goes over."""
        return tuple(tuple(i for i, mode in enumerate(self.out) if mode not in own) for own in self.reduced)

    @property
    def product(self) -> Contraction:
        """Of a and one b, whatever they are, without an epilogue's operands."""
        return Contraction(self.a, self.b, self.out)

    @property
    def gradient_of_a(self) -> Contraction:
        """Of the cotangent and b, stored as a is."""
        return Contraction(self.out, self.b, self.a)

    @property
    def gradient_of_b(self) -> Contraction:
        """Of a and the cotangent, stored as b is."""
        return Contraction(self.a, self.out, self.b)

    @property
    def flip(self) -> tuple[int, ...]:
        """The order of the result's dimensions in its transpose, if it is symmetric."""
        other = dict(zip(self.free_a + self.free_b, self.free_b + self.free_a, strict=True))
        return tuple(self.out.index(other.get(mode, mode)) for mode in self.out)

    def dimension_numbers(self) -> tuple[tuple[Axes, Axes], tuple[Axes, Axes]]:
        """As `lax.dot_general` takes them; its result has the modes `batch + free_a + free_b`, each as here."""
        pairs = [
            (tuple(map(self.a.index, modes)), tuple(map(self.b.index, modes))) for modes in (self.summed, self.batch)
        ]
        return pairs[0], pairs[1]

    @property
    def dot_out(self) -> str:
        """The modes of what `lax.dot_general` returns for `dimension_numbers`."""
        free = ["".join(m for m in x if m not in self.batch + self.summed) for x in (self.a, self.b)]
        return self.batch + "".join(free)

    def free_mode(self) -> str:
        """A letter that no mode has."""
        used = set(self.a + self.b)
        found = next((letter for letter in string.ascii_letters if letter not in used), None)
        if found is None:
            raise ValueError(f"a contraction requires at most {MOST_MODES} modes, got one more than {self}")
        return found


def num_modes(a_rank: int, b_rank: int, dimension_numbers: tuple[tuple[Axes, Axes], tuple[Axes, Axes]]) -> int:
    """Of both operands of a `lax.dot_general` together."""
    (summed, _), (batch, _) = dimension_numbers
    return a_rank + b_rank - len(summed) - len(batch)


def of_dot_general(
    a_rank: int, b_rank: int, dimension_numbers: tuple[tuple[Axes, Axes], tuple[Axes, Axes]]
) -> Contraction:
    """Of what `lax.dot_general` takes, its result's order included."""
    (a_summed, b_summed), (a_batch, b_batch) = dimension_numbers
    if (num := num_modes(a_rank, b_rank, dimension_numbers)) > MOST_MODES:
        raise ValueError(f"a contraction requires at most {MOST_MODES} modes, got {num}: leave it to `lax.dot_general`")
    letters = iter(string.ascii_letters)
    a = [next(letters) for _ in range(a_rank)]
    shared = {int(j): a[int(i)] for i, j in zip((*a_summed, *a_batch), (*b_summed, *b_batch), strict=True)}
    b = [shared[j] if j in shared else next(letters) for j in range(b_rank)]
    batch = [a[int(i)] for i in a_batch]
    free = [*(m for m in a if m not in b), *(m for m in b if m not in a)]
    return Contraction("".join(a), "".join(b), "".join([*batch, *free]))


def of_matmul(a: Sequence[int], b: Sequence[int]) -> tuple[Contraction, tuple[int, ...], tuple[int, ...]]:
    """Of what `matmul` takes, by shapes that fit; and the axes of a and b that only stretch, to be squeezed first."""
    batch_a, batch_b = tuple(a[:-2]), tuple(b[:-2])
    rank = max(len(batch_a), len(batch_b))
    letters = [letter for letter in string.ascii_letters if letter not in "kmn"][:rank]
    of_a, of_b = letters[rank - len(batch_a) :], letters[rank - len(batch_b) :]
    sizes_a, sizes_b = dict(zip(of_a, batch_a, strict=True)), dict(zip(of_b, batch_b, strict=True))
    own_a = [mode for mode in of_a if not (sizes_a[mode] == 1 != sizes_b.get(mode, 1))]
    own_b = [mode for mode in of_b if not (sizes_b[mode] == 1 != sizes_a.get(mode, 1))]
    rows, cols = "m" if len(a) > 1 else "", "n" if len(b) > 1 else ""
    found = Contraction("".join(own_a) + rows + "k", "".join(own_b) + "k" + cols, "".join(letters) + rows + cols)
    axes = [[i for i, mode in enumerate(modes) if mode not in own] for modes, own in ((of_a, own_a), (of_b, own_b))]
    return found, tuple(axes[0]), tuple(axes[1])
