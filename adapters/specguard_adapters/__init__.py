"""Engines for `specguard_chains` that need more than NumPy."""
