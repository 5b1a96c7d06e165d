"""The trained tensors: which they are, which ranks hold the same, how they are sent, stored and compared."""
