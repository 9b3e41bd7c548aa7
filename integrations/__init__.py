"""DeCoRe inside the software of others. `vllm/` is a package of its own; hub.py makes a folder of
`custom_generate/` that stands alone."""
