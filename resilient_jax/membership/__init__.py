"""Which hosts are members of a generation, and what happens next: the rules, and the machine that applies them."""
