"""A broker's task as a Flower app."""
