"""Scripts of the benchmarks that run in processes of their own."""
