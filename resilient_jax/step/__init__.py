"""One step of all hosts: assignment of microbatches, what is kept when a host dies, and reductions."""
