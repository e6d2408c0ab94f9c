"""One step of hosts that hold different blocks of a model: tasks, mail between them, sums and state by block.

See README.md in this folder; `trainer.pipelined_steps` runs it.
"""
