"""Layers that networks share. Streaming layers declare the states that they keep."""
