"""What `make gpu-check` measures: a module for each section, and what they share. docs/gpu.md tells how to read it."""
