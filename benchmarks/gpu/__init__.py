"""Sections of the report on a GPU, which `benchmarks.gpu_check` runs and writes."""
