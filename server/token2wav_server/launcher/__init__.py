"""Launcher of a Triton server: it starts tritonserver, watches it, restarts it, drains it and
cleans up after it.
"""
