"""Campaigns that try to break a job on this machine, and the checks that say whether they did."""
