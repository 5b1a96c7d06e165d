"""What happens at each optimizer step: the record, the commit, the step. Begin with `step_hooks`."""
