"""Conformance suites: the contracts of interfaces, as functions that every implementation passes."""
