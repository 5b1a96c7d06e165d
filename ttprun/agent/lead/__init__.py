"""What is decided, once a job: what the machine's orders come to, and what is published of the run."""
