"""What a process knows: its defaults, cubins, library and devices, and with them what can compute a product.

Knows nothing of how JAX traces: a lowering asks it.
"""
