"""Batches of blocks, and what runs them: torch, Triton-language kernels, CUDA graphs, exported
graphs.
"""
