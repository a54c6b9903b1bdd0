"""Networks as plain modules, and their layers."""
