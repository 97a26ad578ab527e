"""What JAX sees: shape rules, primitives, their derivatives and batching, and how each platform lowers them.

Asks the runtime what computes a product; knows no price.
"""
