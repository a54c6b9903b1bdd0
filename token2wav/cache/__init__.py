"""State of open streams: rows of what layers keep, blocks of the key-value cache, and prefixes that
streams share.
"""
