"""Execution of networks on batches of blocks, eagerly or as CUDA graphs."""
