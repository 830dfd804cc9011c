"""Caches that other trainers wrote: latents and texts in files, read as they lie."""
