"""Step time of a traced step: card data, measured rates and a roofline."""
