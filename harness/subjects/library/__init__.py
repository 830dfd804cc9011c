"""Models of the diffusers library, built from their configurations alone: no weights, no network.

A preset (``flux-dev``) or a class with a configuration (``diffusers:CLASS``); what a model is given
is its family's to say (``families``).
"""
