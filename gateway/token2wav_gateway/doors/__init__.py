"""Doors of the gateway: each translates a protocol into turns, and their events into messages."""
