"""Scripts of the benchmarks that run as processes of their own."""
