"""Estimated prompt tokens against those that real tokenizers count."""
