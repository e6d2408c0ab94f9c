"""What a job does at a change of its members, or about a slow host: situation, options, choice. Pure."""
