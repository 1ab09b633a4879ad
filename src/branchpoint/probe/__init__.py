"""Measurements: what the gradient of a configuration is, and where its variance comes from."""
