"""Edge: connections of clients with bounds of bytes, time and origins, before a door opens."""
