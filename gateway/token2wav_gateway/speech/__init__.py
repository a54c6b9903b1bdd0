"""Speech: a turn, and the servers behind it."""
