"""Registered comparisons: a study is written down and frozen, then run, then reported as it was written."""
