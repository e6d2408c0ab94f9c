"""One step of all hosts: who computes which microbatch, what is kept when a host dies, and how it is summed."""
