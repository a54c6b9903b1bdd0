"""Soak of a real server among misbehaving clients, and rehearsal of servers behind the balancer."""
