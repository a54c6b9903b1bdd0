"""Memory of open streams: the states of layers in slots, keys and values in pages, and prefixes
that streams share.
"""
