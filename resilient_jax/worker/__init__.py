"""The worker process: the loop over generations, `World`, and the connection to the agent."""
