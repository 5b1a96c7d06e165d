"""The trained tensors: which they are, which ranks hold the same, how they are sent, stored and compared.

What they need of whoever uses them: current_rank.py. May import: introspect, device, protocol, state.
Begin with optimizer_registry.py (what is trained), then replicated.py (what each rank holds).
"""
