"""What happens by itself: the worker plays tasks, one step at a time, in this process or on Flower, and ends them."""
