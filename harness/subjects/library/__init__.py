"""Models of the diffusers library, built from their configurations without weights or network.

A model is a preset (``flux-dev``) or a class with a configuration (``diffusers:CLASS``). Its family
defines its inputs (``families``).
"""
