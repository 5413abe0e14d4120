"""fp32 masters on SSD of which the parameter in bf16 has the higher half already."""
