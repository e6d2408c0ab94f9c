"""What a program costs, measured from the program itself: FLOPs, bytes, memory and communication for the planner."""
