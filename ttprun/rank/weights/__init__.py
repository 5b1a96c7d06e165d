"""What is trained: which tensors those are, who holds the same, how they are sent, stored and compared."""
