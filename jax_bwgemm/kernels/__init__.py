"""BUILD TIME ONLY: device code, and in `aot` the catalogue of what ships and the ahead-of-time build."""
