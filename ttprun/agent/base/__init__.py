"""What a node, what is decided, and the way between them stand on: none of it imports one of those."""
