"""Ensemble of three stages, each of which runs as a Triton model of its own.

The stages can be scaled separately. docs/ensemble.md explains when that is useful.
"""
