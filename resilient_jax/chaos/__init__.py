"""Chaos campaigns: they break a job on this machine as a manifest says, and check the invariants of the job."""
