"""What processes exchange: records of the store, messages, and the connections of a host that carry messages."""
