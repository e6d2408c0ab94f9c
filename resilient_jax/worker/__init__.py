"""The worker process: the generation loop, `World`, and the connection to the agent."""
