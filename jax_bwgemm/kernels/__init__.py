"""BUILD TIME ONLY: device code, the catalogue of what ships, and the ahead-of-time build."""
