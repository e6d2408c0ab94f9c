"""The training state between worlds: flattened, captured, restored onto any mesh, sent to other hosts."""
