"""Training a small part: adapters beside frozen weights, or some of the weights alone."""
