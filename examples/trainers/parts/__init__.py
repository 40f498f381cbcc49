"""What the examples need and a user need not read."""
