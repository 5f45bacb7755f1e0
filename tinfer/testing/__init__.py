"""Case lists, comparisons and timing shared by tests, bring-up and benchmarks."""
