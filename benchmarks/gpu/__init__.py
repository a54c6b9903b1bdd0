"""What `benchmarks.gpu_check` measures on a GPU, section by section, and the report that it writes of that."""
