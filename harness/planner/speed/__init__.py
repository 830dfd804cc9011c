"""Time of a traced step: data of cards, measured or typical rates, and a roofline."""
