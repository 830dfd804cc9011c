"""Caches of other trainers: precomputed latents and text embeddings, read from their files."""
