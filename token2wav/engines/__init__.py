"""What runs the networks: one protocol, several implementations."""
