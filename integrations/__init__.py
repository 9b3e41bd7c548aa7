"""DeCoRe inside the software of others. `custom_generate/` and `vllm/` stand alone."""
