"""MindIO TTP's interface, by ttprun: the same names and order, and the agent of `ttprun --mindio` as its controller."""
