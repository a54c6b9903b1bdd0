"""State of open streams."""
