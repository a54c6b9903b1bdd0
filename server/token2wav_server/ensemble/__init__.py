"""Ensemble of stages: each runs as a Triton model of its own, to be scaled apart. docs/ensemble.md
says when.
"""
