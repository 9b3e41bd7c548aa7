"""DeCoRe inside the software of others. Each file or folder stands alone."""
