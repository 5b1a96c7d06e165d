"""MindIO's interface, without launcher."""
