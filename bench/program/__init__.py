"""What every contestant's program shares. Standard library only: it runs in each peer's own environment."""
