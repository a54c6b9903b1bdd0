"""State of open streams: blocks of the key-value cache, and the prefixes that streams share."""
