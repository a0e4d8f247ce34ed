"""What all samplers have in common."""
