"""Triton-language kernels for the flow on NVIDIA GPUs.

Tests without a GPU run them in Triton's interpreter.
"""
