"""The market as a Flower app."""
