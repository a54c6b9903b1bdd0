"""Edge: connections of clients with bounds of bytes, time and origins, before a door opens.

Clients may reach the gateway directly, so it relies on no other layer for these checks.
"""
