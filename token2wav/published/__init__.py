"""Published model folders: their files, their formats, and the sizes that they declare.

Nothing in this package imports torch, except `registry.unfilled_network` while it runs.
"""
