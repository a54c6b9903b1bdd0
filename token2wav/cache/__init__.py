"""State of open streams: slots with the states of layers, pages of the key-value cache, and the
prefixes that streams share.
"""
