"""DataLoaders: where they are, what they gave, and what their workers draw."""
