"""What `explain --json` prints: an explanation as plain dictionaries. The text is `explain`'s own."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from jax_bwgemm.explain import Explanation, FunctionExplanation
from jax_bwgemm.planner.candidates import Candidate
from jax_bwgemm.planner.plan import Plan
from jax_bwgemm.runtime.record import Product


def of_product(explanation: Explanation) -> dict[str, Any]:
    """`kernel` is None where XLA takes over, and `reason` then says why; with a kernel, why XLA has the epilogue, or
    why it adds up parts of k."""
    plan = explanation.plan
    found: dict[str, Any] = {"problem": str(explanation.problem), "flops": explanation.problem.flops}
    found |= {"min_bytes": explanation.problem.min_bytes, "device": plan.arch.name if plan else None}
    found |= {"kernel": explanation.variant, "reason": explanation.reason, "repacks": list(explanation.repacks)}
    found["candidates"] = [_candidate(c, plan) for c in plan.candidates] if plan else []
    if plan and plan.tile and explanation.variant:
        found["plan"] = {
            "source": plan.source,
            "swapped": plan.swapped,
            "raster_group": plan.raster_group,
            "raster_along_n": bool(plan.raster_along_n),
            "raster_order": plan.raster_order,
            "stream": dataclasses.asdict(plan.stream),
            "a_l2": plan.a_l2,
            "b_l2": plan.b_l2,
            "parts": explanation.parts,
        }
    return found


def _candidate(candidate: Candidate, plan: Plan) -> dict[str, Any]:
    cost = candidate.cost
    return {
        "tile": str(candidate.tile),
        "swapped": candidate.swapped,
        "chosen": candidate is plan.chosen,
        "reason": candidate.reason,
        "measured_us": _finite(candidate.measured_us),
        "predicted_us": cost.us if cost else None,
        "utilisation": cost.utilisation if cost else None,
        "waves": cost.waves if cost else None,
        "bound": cost.bound if cost else None,
    }


def of_function(explanation: FunctionExplanation) -> dict[str, Any]:
    """`us` of a product is 0 where it is XLA's, which nobody has predicted, and None where it is unknown. Amounts of
    symbolic sizes are texts."""
    products = [dataclasses.asdict(product) | _amounts(product) for product in explanation.products]
    return {
        "us": _finite(sum(product.us for product in explanation.products)),
        "flops": _known(explanation.flops),
        "min_bytes": _known(explanation.min_bytes),
        "products": products,
    }


def _amounts(product: Product) -> dict[str, Any]:
    return {"us": _finite(product.us), "flops": _known(product.flops), "min_bytes": _known(product.min_bytes)}


def _known(amount: int) -> int | str:
    return amount if isinstance(amount, int) else str(amount)


def _finite(us: float | None) -> float | None:
    """JSON has no infinity, which is an unknown time."""
    return us if us is not None and math.isfinite(us) else None
