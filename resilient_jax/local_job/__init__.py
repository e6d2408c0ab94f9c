"""A job on this machine as a child process: started, observed, held at failpoints and killed from outside."""
