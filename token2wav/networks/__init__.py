"""Networks as plain modules, and the layers they are made of."""
