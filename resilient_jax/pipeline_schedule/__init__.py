"""Pipelines as plain data: routes of microbatches, orders of tasks, rerouting, groups of holders."""
