"""What `explain --json` prints: an explanation as plain dictionaries. The text is `explain`'s own."""

from __future__ import annotations

import dataclasses
from typing import Any

from jax_bwgemm.explain import Explanation, FunctionExplanation
from jax_bwgemm.planner.plan import Candidate, Plan


def of_product(explanation: Explanation) -> dict[str, Any]:
    """`kernel` is None where XLA takes over, and `reason` then says why; with a kernel, why XLA has the epilogue."""
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
        }
    return found


def _candidate(candidate: Candidate, plan: Plan) -> dict[str, Any]:
    cost = candidate.cost
    return {
        "tile": str(candidate.tile),
        "swapped": candidate.swapped,
        "chosen": candidate is plan.chosen,
        "reason": candidate.reason,
        "measured_us": candidate.measured_us,
        "predicted_us": cost.us if cost else None,
        "utilisation": cost.utilisation if cost else None,
        "waves": cost.waves if cost else None,
        "bound": cost.bound if cost else None,
    }


def of_function(explanation: FunctionExplanation) -> dict[str, Any]:
    """`us` of a product is 0 where it is XLA's, which nobody has predicted."""
    products = [dataclasses.asdict(product) for product in explanation.products]
    return {"us": sum(product.us for product in explanation.products), "products": products}
