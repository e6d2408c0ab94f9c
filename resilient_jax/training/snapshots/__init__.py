"""The training state into this host's part of a snapshot, and from the parts of all hosts back onto any mesh.

See README.md in this folder.
"""
