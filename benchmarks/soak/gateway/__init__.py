"""Soak of the gateway: a real gateway with misbehaving clients and failing servers behind it."""
