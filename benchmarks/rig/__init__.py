"""Two hosts on one machine: benchmarks and tests run DeepSpeed's real launcher over a real, shaped link between them."""
