"""Benchmarks: every file is a script of its own; ``python -m benchmarks`` runs them all."""
