"""What is decided, once a job: what the machine's orders come to."""
