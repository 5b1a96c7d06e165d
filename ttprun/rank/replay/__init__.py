"""How a replacement gets to the place of the lost rank, and what the other ranks do meanwhile."""
