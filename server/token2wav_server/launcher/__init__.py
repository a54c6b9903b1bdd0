"""Launcher of a Triton server, which starts, watches, restarts, drains and stops tritonserver."""
