"""Two hosts on one machine. Benchmarks and tests run DeepSpeed's real launcher on them, over a link of a given rate."""
